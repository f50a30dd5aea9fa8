"""A proxy that keeps what clients send, one of a kind: what tests/http/test_clients.py asks again."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LONGEST = 8000  # bytes of a body that is worth keeping
KEPT_HEADERS = ("accept", "content-type", "user-agent", "anthropic-version")


class Recorder:
    """Requests by what is new in them: the client, the path, and the fields of the body."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.client = ""  # whose turn it is
        self.kept: dict[str, dict[str, Any]] = {}

    def keep(self, method: str, path: str, headers: dict[str, str], body: bytes, status: int) -> None:
        if len(body) > LONGEST or not self.client:
            return
        asked = json.loads(body) if body else None
        kind = json.dumps([self.client, method, path, sorted(asked) if asked else None, choice_of(asked)])
        told = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        one = {"client": self.client, "method": method, "path": path, "headers": told, "body": asked}
        one["status"] = status
        self.kept.setdefault(kind, one)


def choice_of(asked: Any) -> str:
    return json.dumps((asked or {}).get("tool_choice"), sort_keys=True)


@contextmanager
def proxy(recorder: Recorder) -> Iterator[str]:
    """An endpoint of its own before the ring's; its address."""

    class Endpoint(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            onward = http.client.HTTPConnection(recorder.target.netloc)
            onward.request(self.command, self.path, body, headers | {"host": recorder.target.netloc})
            told = onward.getresponse()
            recorder.keep(self.command, self.path, headers, body, told.status)
            self.send_response_only(told.status)
            for name, value in told.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            with suppress(BrokenPipeError):  # a client that goes away
                while piece := told.read1(65536):
                    self.wfile.write(piece)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
