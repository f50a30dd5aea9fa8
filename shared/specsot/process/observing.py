"""What a process shows of itself to those who watch it: figures at a door of their own, and spans.

Refuses to know what is counted and traced. Nothing is imported for what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from specsot.errors import InvalidRequest
from specsot.process.options import ServiceOptions, reachable
from specsot.tracing import OFF, Tracer
from specsot.tracing.starting import start_tracing

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Observation:
    """registry: where figures are told; None: nobody asks for them. tracer: where spans begin."""

    registry: CollectorRegistry | None = None
    tracer: Tracer = OFF


@contextmanager
def observed(service: str, options: ServiceOptions) -> Generator[Observation]:
    """Raises InvalidRequest without the extra, Unavailable when the address cannot be had."""
    tracer = start_tracing(service)
    if options.metrics is None:
        yield Observation(tracer=tracer)
        return
    try:
        from specsot.process.figures import open_figures_door, registry_of
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"--metrics needs {error.name}: pip install 'specsot[observe]'", field="metrics"
        ) from None
    registry = registry_of(service)
    door = open_figures_door(options.metrics, registry, options.tls)
    scheme = "http" if options.tls.cert is None else "https"
    log.info("figures", at=f"{scheme}://{reachable(None, options.metrics, door.port)}/metrics")
    try:
        yield Observation(registry, tracer)
    finally:
        door.close()
