"""Figures of a process for Prometheus: a registry that has the machine's own already, and a door for them.

Refuses to know what else is counted. Needs prometheus-client: imported only where figures are asked for.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Thread, Timer
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer
from prometheus_client.registry import Collector

from specsot._version import __version__
from specsot.errors import Unavailable
from specsot.process.gpus import look_at_gpus
from specsot.rpc.serve import check_free, reason, split_address
from specsot.rpc.tls import PLAIN, Tls, secured_context

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SECONDS = 10.0  # in which a reader must have asked, and taken its answer
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

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread, self.port = server, thread, server.server_port

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
    """Serve them at host:port. Raises, in one line, Unavailable (the address cannot be had), InvalidRequest.

    tls: who this is; with those who vouch for others, a reader must show a certificate of theirs.
    """
    check_free(listen)
    host, port = split_address(listen)
    try:
        server = make_server(host, port, _page(registry), _server_at(host), _Quiet)
    except OSError as error:
        raise Unavailable(f"cannot listen at {listen}: {reason(error)}") from None
    if (context := secured_context(tls)) is not None:
        context.verify_mode = ssl.CERT_REQUIRED if tls.mutual else ssl.CERT_NONE
        # Each connection's own thread shakes hands: who stalls there keeps nobody else waiting.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = Thread(target=server.serve_forever, name="figures", daemon=True)
    thread.start()
    return FiguresDoor(server, thread)


def _page(registry: CollectorRegistry) -> WSGIApplication:
    """Always the plain format: in the other one the client library spells colons as underscores for
    readers that do not ask for UTF-8, as Prometheus 2 does not.
    """

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
        return [generate_latest(registry)]

    return answer


def _server_at(host: str) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # it may be closed by now
        connection.shutdown(socket.SHUT_RDWR)


class _Quiet(WSGIRequestHandler):
    """One line a scrape would be all the log. A reader has a thread of ours: not for ever."""

    def handle(self) -> None:
        """Whoever is slow is cut off, in whatever it is slow: shaking hands, asking, reading."""
        limit = Timer(SECONDS, _cut, (self.connection,))
        limit.daemon = True
        limit.start()
        try:
            super().handle()
        except (OSError, ValueError):  # ValueError: of TLS, where it was cut while it shook hands
            pass
        finally:
            limit.cancel()

    def log_message(self, format: str, *args: object) -> None: ...
