"""The page of figures: what Prometheus' scrapers of any age read there, and over TLS whoever may."""

from __future__ import annotations

import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from prometheus_client import CollectorRegistry, Counter

from specsot.errors import Unavailable
from specsot.service import telemetry
from specsot.service.telemetry import (
    Gpu,
    MetricsServer,
    gpu_families,
    open_metrics_server,
    read_gpus,
    registry_of,
)
from specsot.transport.security import PLAIN, Tls

pytestmark = pytest.mark.timeout(30)

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.3"


@contextmanager
def opened(tls: Tls = PLAIN) -> Iterator[MetricsServer]:
    registry = registry_of("worker")
    Counter("specsot:worker_frames", "Frames", registry=registry).inc(3)
    endpoint = open_metrics_server("127.0.0.1:0", registry, tls)
    try:
        yield endpoint
    finally:
        endpoint.close()


def read(url: str, accept: str = "", context: ssl.SSLContext | None = None) -> str:
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.build_opener(*handlers).open(request, timeout=100) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


@pytest.mark.parametrize("accept", ["", PROMETHEUS_2, PROMETHEUS_3])
def test_metric_names_keep_their_colons_in_every_format(accept: str) -> None:
    with opened() as endpoint:
        page = read(f"http://127.0.0.1:{endpoint.port}/metrics", accept)
    assert "specsot:worker_frames_total 3.0" in page
    assert 'specsot_build_info{service="worker"' in page
    assert "process_resident_memory_bytes" in page


def test_an_address_in_use_is_one_line() -> None:
    with (
        opened() as endpoint,
        pytest.raises(Unavailable, match=r"cannot listen at .*: address already in use"),
    ):
        open_metrics_server(f"127.0.0.1:{endpoint.port}", CollectorRegistry())


class Papers:
    """A CA, and files of what it gave to a service."""

    def __init__(self, folder: Path) -> None:
        self.authority, self._folder = trustme.CA(), folder
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        self.tls = Tls(folder / "ca.pem", folder / "own.pem", folder / "own.key")
        self.renew()

    def renew(self) -> None:
        own = self.authority.issue_cert("127.0.0.1")
        own.cert_chain_pems[0].write_to_path(self._folder / "own.pem")
        own.private_key_pem.write_to_path(self._folder / "own.key")

    def context(self, shown: bool) -> ssl.SSLContext:
        """A reader's."""
        context = ssl.create_default_context(cafile=str(self._folder / "ca.pem"))
        if shown:
            self.authority.issue_cert("prometheus").configure_cert(context)
        return context


def test_with_certificates_a_reader_must_show_one_too(tmp_path: Path) -> None:
    tls_files = Papers(tmp_path)
    with opened(tls_files.tls) as endpoint:
        url = f"https://127.0.0.1:{endpoint.port}/metrics"
        assert "specsot:worker_frames_total" in read(url, context=tls_files.context(shown=True))
        with pytest.raises((ssl.SSLError, OSError)):
            read(url, context=tls_files.context(shown=False))


def test_a_renewed_certificate_is_taken_in_service(tmp_path: Path) -> None:
    tls_files = Papers(tmp_path)
    with opened(tls_files.tls) as endpoint:
        before = shown_at(endpoint.port, tls_files)
        tls_files.renew()
        assert shown_at(endpoint.port, tls_files) != before
        with pytest.raises((ssl.SSLError, OSError)):
            read(f"https://127.0.0.1:{endpoint.port}/metrics", context=tls_files.context(shown=False))


def shown_at(port: int, tls_files: Papers) -> bytes | None:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=100) as plain,
        tls_files.context(shown=True).wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        return secured.getpeercert(binary_form=True)


def test_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(0, "H100", 5, 80, 0.5), Gpu(1, "H100", 7, 80, 0.0)]
    monkeypatch.setattr(telemetry, "read_gpus", lambda: gpus)
    told = {(s.name, s.labels["gpu"]): s.value for family in gpu_families() for s in family.samples}
    assert told["specsot:gpu_memory_used_bytes", "1"] == 7
    assert told["specsot:gpu_busy_ratio", "0"] == 0.5


def test_without_nvidias_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no such library")

    from specsot.service import telemetry

    telemetry._nvml_ready.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", SimpleNamespace(nvmlInit=missing))
    try:
        assert read_gpus() == []
        assert list(gpu_families()) == []
    finally:
        telemetry._nvml_ready.cache_clear()


@pytest.mark.parametrize("said", [b"", b"GET /metr", b"GET / HTTP/1.1\r\nx: y\r\n"])
def test_a_reader_that_never_asks_is_cut_off(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a thread of the service."""
    monkeypatch.setattr(telemetry, "READER_SECONDS", 0.05)
    with opened() as endpoint, socket.create_connection(("127.0.0.1", endpoint.port), 20) as reader:
        reader.sendall(said)
        assert reader.recv(1000) == b""
