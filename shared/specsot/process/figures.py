"""Figures of a process for Prometheus: a registry that has the machine's own already, and a door for them.

Refuses to know what else is counted. Needs prometheus-client: imported only where figures are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from specsot import __version__
from specsot.errors import Unavailable
from specsot.process.gpus import look_at_gpus
from specsot.rpc.serve import check_free, split_address
from specsot.rpc.tls import PLAIN, Tls

LAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds


class Looked(Collector):
    """Families that are looked up when somebody asks for them."""

    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        return self._look()

    def describe(self) -> Iterable[Metric]:
        return ()


class FiguresDoor:
    """A page of figures, served by a thread of its own. `port` is the real one."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread, self.port = server, thread, int(server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def registry_of(service: str) -> CollectorRegistry:
    """With what every process has: its memory, cores and files, the machine's GPUs, its version."""
    disable_created_metrics()  # when each began: a fourth of the page, and nobody asks
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Looked(lambda: (version_of(service), *gpu_families())))
    return registry


def version_of(service: str) -> Metric:
    return InfoMetricFamily("specsot_build", "What runs here", {"service": service, "version": __version__})


def gpu_families() -> Iterator[Metric]:
    """Nothing where there is none."""
    gpus = look_at_gpus()
    for name, about, values in (
        ("gpu_memory_used_bytes", "Memory in use", [gpu.used for gpu in gpus]),
        ("gpu_memory_total_bytes", "Memory there is", [gpu.total for gpu in gpus]),
        ("gpu_busy_ratio", "Share of the last moments in which it computed", [gpu.busy for gpu in gpus]),
    ):
        if gpus:
            gauge = GaugeMetricFamily(f"specsot:{name}", about, labels=("gpu", "name"))
            for gpu, value in zip(gpus, values):
                gauge.add_metric((str(gpu.index), gpu.name), value)
            yield gauge


def open_figures_door(listen: str, registry: CollectorRegistry, tls: Tls = PLAIN) -> FiguresDoor:
    """Serve them at host:port. Raises Unavailable, in one line, when the address cannot be had.

    tls: who this is; with those who vouch for others, a reader must show a certificate of theirs.
    """
    check_free(listen)
    host, port = split_address(listen)
    try:
        return FiguresDoor(
            *start_http_server(
                port,
                host,
                registry,
                certfile=None if tls.cert is None else str(tls.cert),
                keyfile=None if tls.key is None else str(tls.key),
                client_cafile=None if tls.ca is None else str(tls.ca),
                client_auth_required=tls.mutual,
            )
        )
    except OSError as error:
        raise Unavailable(f"cannot listen at {listen}: {error}") from None
