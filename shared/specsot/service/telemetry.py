"""Metrics of a process and of the machine's GPUs, as a Prometheus page; spans by OpenTelemetry."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer
from prometheus_client.registry import Collector

from specsot._version import __version__
from specsot.errors import Unavailable
from specsot.members import Configuration
from specsot.service.options import ServiceOptions, reachable
from specsot.tracing import OFF, Tracer
from specsot.tracing.starting import start_tracing
from specsot.transport.grpc_server import check_free, reason, split_address
from specsot.transport.security import PLAIN, Tls, secured_context

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


# Seconds in which a reader of metrics must have sent its request and taken the answer; not measured.
READER_SECONDS = 10.0
# Seconds, upper bounds of a histogram: from a GPU's lap to a CPU's over a slow link.
LAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class PolledCollector(Collector):
    """Families that are looked up when somebody asks for them."""

    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        return self._look()

    def describe(self) -> Iterable[Metric]:
        return ()


def epoch_gauges(member: str, configuration: Configuration, free: int) -> Iterator[Metric]:
    """What worker and drafter alike tell of their epoch."""
    for name, about, value in (
        ("epoch", "The epoch it takes part in", configuration.epoch),
        ("kv_pages", "KV pages it has", configuration.pages),
        ("kv_pages_free", "KV pages that no sequence has here", free),
    ):
        yield GaugeMetricFamily(f"specsot:{member}_{name}", about, value)


class MetricsServer:
    """A page of figures, served by a thread of its own. `port` is the real one."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self.port = server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def registry_of(service: str) -> CollectorRegistry:
    """With what every process has: its memory, cores and files, the machine's GPUs, its version."""
    disable_created_metrics()  # when each began: a fourth of the page, and nobody asks
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(PolledCollector(lambda: (version_of(service), *gpu_families())))
    return registry


def version_of(service: str) -> Metric:
    return InfoMetricFamily("specsot_build", "What runs here", {"service": service, "version": __version__})


def gpu_families() -> Iterator[Metric]:
    """Nothing where there is none."""
    gpus = read_gpus()
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


def open_metrics_server(listen: str, registry: CollectorRegistry, tls: Tls = PLAIN) -> MetricsServer:
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
    looks = 0.1  # seconds between two looks whether to end; not measured
    thread = Thread(target=server.serve_forever, args=(looks,), name="figures", daemon=True)
    thread.start()
    return MetricsServer(server, thread)


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
        limit = Timer(READER_SECONDS, _cut, (self.connection,))
        limit.daemon = True
        limit.start()
        try:
            super().handle()
        except (OSError, ValueError):  # ValueError: of TLS, where it was cut while it shook hands
            pass
        finally:
            limit.cancel()

    def log_message(self, format: str, *args: object) -> None: ...


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Observation:
    """registry: where figures are told; None: nobody asks for them. tracer: where spans begin."""

    registry: CollectorRegistry | None = None
    tracer: Tracer = OFF

    @property
    def on(self) -> bool:
        """Whether anybody asks for anything: what happens in every lap is noted for nobody else."""
        return self.registry is not None or self.tracer.on


@contextmanager
def observed(service: str, options: ServiceOptions) -> Generator[Observation]:
    """Raises InvalidRequest, Unavailable when the address cannot be had."""
    tracer = start_tracing(service)
    if options.metrics is None:
        yield Observation(tracer=tracer)
        return
    registry = registry_of(service)
    door = open_metrics_server(options.metrics, registry, options.tls)
    scheme = "http" if options.tls.cert is None else "https"
    log.info(
        "figures", service=service, at=f"{scheme}://{reachable(None, options.metrics, door.port)}/metrics"
    )
    try:
        yield Observation(registry, tracer)
    finally:
        door.close()


@dataclass(frozen=True, slots=True)
class Gpu:
    """used, total: bytes of its memory. busy: share of the last moments in which it computed."""

    index: int
    name: str
    used: int
    total: int
    busy: float


def read_gpus() -> list[Gpu]:
    if not _ready():
        return []
    import pynvml

    try:
        return [_read(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


@cache
def _ready() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # missing library, missing driver, no permission: all the same to us
        return False
    return True


def _read(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    shown = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    rates: Any = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return Gpu(index, shown, int(memory.used), int(memory.total), rates.gpu / 100)
