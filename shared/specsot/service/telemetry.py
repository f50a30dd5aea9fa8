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


# Seconds in which a client of the metrics must have sent its request and read the response. Untuned.
READER_SECONDS = 10.0
# Seconds. Upper bounds of a histogram, from a step on a GPU to a step on CPUs over a slow link.
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class PolledCollector(Collector):
    """A collector of metrics that are computed each time they are read."""

    def __init__(self, read_metrics: Callable[[], Iterable[Metric]]) -> None:
        """read_metrics: returns the present metrics. Called on the thread of the metrics server."""
        self._read_metrics = read_metrics

    def collect(self) -> Iterable[Metric]:
        """Return the present metrics."""
        return self._read_metrics()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not compute its metrics."""
        return ()


def epoch_gauges(member: str, configuration: Configuration, free: int) -> Iterator[Metric]:
    """Yield the metrics of an epoch that workers and drafters have in common: its number, KV pages, free KV
    pages.

    member: "worker" or "drafter".
    configuration: the epoch's configuration.
    free: number of free KV pages.
    """
    for name, about, value in (
        ("epoch", "The epoch it takes part in", configuration.epoch),
        ("kv_pages", "KV pages it has", configuration.pages),
        ("kv_pages_free", "KV pages that no sequence has here", free),
    ):
        yield GaugeMetricFamily(f"specsot:{member}_{name}", about, value)


class MetricsServer:
    """A server of metrics in a thread of its own.

    port: the port on which the server listens.
    """

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        """Hold a server that runs in a thread.

        server: the listening server.
        thread: the thread in which the server runs.
        """
        self._server = server
        self._thread = thread
        self.port = server.server_port

    def close(self) -> None:
        """Stop the server, and wait for its thread.

        Requests that are running are not waited for.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def registry_of(service: str) -> CollectorRegistry:
    """Return a registry with the metrics of every process: memory, cores, files, GPUs, version.

    service: the value of `service` in the metric `specsot_build`.

    Also disables, for the whole process, the metrics that say when another metric was created. The GPUs are
    read each time the metrics are read.
    """
    # The creation times of metrics would be a fourth of the page, and are of no use.
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(PolledCollector(lambda: (version_of(service), *gpu_families())))
    return registry


def version_of(service: str) -> Metric:
    """Return the metric `specsot_build`, whose labels are the service and its version.

    service: name of the service.
    """
    return InfoMetricFamily("specsot_build", "What runs here", {"service": service, "version": __version__})


def gpu_families() -> Iterator[Metric]:
    """Yield three metrics of the machine's GPUs: bytes of memory in use, bytes of memory, and the fraction of
    the last moments in which the GPU computed. Each has one value per GPU, with the labels gpu (the index)
    and name. Yields nothing if there are none.
    """
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
    """Serve a registry at host:port, in a thread of its own, and return the running server.

    listen: the address. With port 0, any free port is used.
    registry: the metrics.
    tls: certificate of the server. If it includes a CA, clients need a certificate of that CA.

    Raises Unavailable if the address is not available, InvalidRequest if TLS files are invalid.

    Without a certificate in `tls`, the metrics are served as plain HTTP. Returns the server, which the caller
    must close.
    """
    check_free(listen)
    host, port = split_address(listen)
    try:
        server = make_server(host, port, _page(registry), _server_at(host), _Quiet)
    except OSError as error:
        raise Unavailable(f"cannot listen at {listen}: {reason(error)}") from None
    if (context := secured_context(tls)) is not None:
        context.verify_mode = ssl.CERT_REQUIRED if tls.mutual else ssl.CERT_NONE
        # The handshake runs in each connection's own thread, so that a client that stalls delays no other.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    # Seconds between two checks whether to stop. Untuned.
    check_seconds = 0.1
    thread = Thread(target=server.serve_forever, args=(check_seconds,), name="metrics", daemon=True)
    thread.start()
    return MetricsServer(server, thread)


def _page(registry: CollectorRegistry) -> WSGIApplication:
    """Return the WSGI application that serves a registry, always in the plain text format.

    In the OpenMetrics format, the library replaces colons in names by underscores for clients that do not ask
    for UTF-8, such as Prometheus 2.

    registry: the metrics.

    Every path and every method gets the status 200 and the same page.
    """

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Return the page of the metrics, whatever was requested.

        environ: the request. Not needed.
        start: sends the status and the headers.
        """
        start("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
        return [generate_latest(registry)]

    return answer


def _server_at(host: str) -> type[ThreadingWSGIServer]:
    """Return a server class for the address family of a host: IPv6 for an address with colons, otherwise
    IPv4.

    host: a host name or an IP address.

    A host name counts as IPv4. The class handles each connection in a thread of its own.
    """

    class Server(ThreadingWSGIServer):
        """A threading server of the host's address family."""

        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server


def _shut_down(connection: socket.socket) -> None:
    """End a connection in both directions. Does nothing if it is closed already.

    connection: the connection of one request.
    """
    # The connection may be closed already.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Quiet(WSGIRequestHandler):
    """Handles a request without logging it, and limits its time, because each request occupies a thread."""

    def handle(self) -> None:
        """Handle a request. The connection is cut after READER_SECONDS, handshake and reading included.

        Errors of the connection, such as a client that disconnects or a failed TLS handshake, are ignored.
        """
        limit = Timer(READER_SECONDS, _shut_down, (self.connection,))
        limit.daemon = True
        limit.start()
        try:
            super().handle()
        except (OSError, ValueError):  # TLS raises ValueError if the connection is cut during the handshake.
            pass
        finally:
            limit.cancel()

    def log_message(self, format: str, *args: object) -> None:
        """Write no line about a request.

        format, args: the line that would be written.
        """


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Observation:
    """The metrics and traces of a process.

    registry: the registry of metrics, or None if they are not served.
    tracer: creates spans.
    """

    registry: CollectorRegistry | None = None
    tracer: Tracer = OFF

    @property
    def on(self) -> bool:
        """True if metrics or traces are collected. Otherwise steps record nothing."""
        return self.registry is not None or self.tracer.on


@contextmanager
def observed(service: str, options: ServiceOptions) -> Generator[Observation]:
    """Return a context in which a service's metrics are served, if an address is given, and spans are
    collected.

    The context yields the metrics and the tracer to use; without an address, the registry is None.

    service: name of the service, in metrics and spans.
    options: the service's options, which name the address of the metrics.

    Raises InvalidRequest if TLS files are invalid, Unavailable if the address is not available.

    The server is closed at the end of the context. Spans are collected only if tracing is configured in the
    environment.
    """
    tracer = start_tracing(service)
    if options.metrics is None:
        yield Observation(tracer=tracer)
        return
    registry = registry_of(service)
    endpoint = open_metrics_server(options.metrics, registry, options.tls)
    scheme = "http" if options.tls.cert is None else "https"
    log.info(
        "metrics served",
        service=service,
        at=f"{scheme}://{reachable(None, options.metrics, endpoint.port)}/metrics",
    )
    try:
        yield Observation(registry, tracer)
    finally:
        endpoint.close()


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of one GPU.

    index: number of the GPU.
    name: name of the GPU.
    used: bytes of memory in use.
    total: bytes of memory.
    busy: fraction of the last moments in which the GPU computed.
    """

    index: int
    name: str
    used: int
    total: int
    busy: float


def read_gpus() -> list[Gpu]:
    """Return the state of all GPUs of the machine; empty if there are none or if they cannot be read.

    The list is empty too if any single GPU cannot be read.
    """
    if not _nvml_ready():
        return []
    import pynvml

    try:
        return [_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


@cache
def _nvml_ready() -> bool:
    """Return True if NVIDIA's library can be used. It is loaded at the first call, whose result is cached.

    False if the library or the driver is missing, or if access is not permitted.

    The library stays loaded for the rest of the process.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # The library or the driver is missing, or access is not permitted.
        return False
    return True


def _read_gpu(index: int) -> Gpu:
    """Return the state of one GPU. Raises pynvml.NVMLError if it cannot be read.

    index: number of the GPU.

    Bytes of a name that are no text are replaced. `busy` is between 0 and 1.
    """
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = str(pynvml.nvmlDeviceGetName(handle))
    rates: Any = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return Gpu(index, name, int(memory.used), int(memory.total), rates.gpu / 100)
