"""A hub on loopback: as much of huggingface.co as huggingface_hub asks for. Counts what is fetched."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TREE = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class LocalHub(ThreadingHTTPServer):
    """Repositories by name, of one commit each. gated: those that need the token."""

    daemon_threads = True

    def __init__(self, token: str = "hf_secret") -> None:
        super().__init__(("127.0.0.1", 0), _Visit)
        self.token, self.repositories, self.gated = token, dict[str, Path](), set[str]()
        self._fetched = list[tuple[str, str]]()
        self._guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, folder: Path, gated: bool = False) -> str:
        """The commit."""
        self.repositories[name] = folder
        if gated:
            self.gated.add(name)
        return commit_of(name)

    def record(self, repository: str, file: str) -> None:
        with self._guard:
            self._fetched.append((repository, file))

    def fetched(self) -> dict[str, set[str]]:
        """Files of each repository whose contents somebody was sent since this was asked last."""
        with self._guard:
            found, self._fetched = self._fetched, []
        assert len(found) == len(set(found)), f"fetched twice: {sorted(found)}"
        return {name: {file for one, file in found if one == name} for name, _ in found}


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


class _Visit(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        api, file = TREE.match(self.path), FILE.fullmatch(self.path)
        found = api or file
        name, revision = (found[1], (file or api)[2 if file else 3]) if found else ("", None)  # type: ignore[index]
        folder = self.server.repositories.get(name)
        if folder is None:
            self._refuse(401, "RepoNotFound")
        elif revision not in (None, "main", commit_of(name)):
            self._refuse(404, "RevisionNotFound")
        elif api:
            self._list(name, folder, tree=api[2] == "tree")
        elif file and not (folder / file[3]).is_file():
            self._refuse(404, "EntryNotFound")
        elif name in self.server.gated and self.headers["authorization"] != f"Bearer {self.server.token}":
            self._refuse(401, "GatedRepo")
        elif file:
            self._send(name, folder / file[3], file[3])

    def _list(self, name: str, folder: Path, tree: bool) -> None:
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        if tree:
            listed: Any = [
                {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": _etag(one)}
                for one in files
            ]
        else:
            listed = {
                "id": name, "sha": commit_of(name), "siblings": [{"rfilename": one.name} for one in files],
                "private": False, "tags": [], "downloads": 0, "likes": 0,
            }  # fmt: skip
        self._write(200, json.dumps(listed).encode(), {"content-type": "application/json"})

    def _send(self, name: str, path: Path, file: str) -> None:
        data, status = path.read_bytes(), 200
        headers = {"etag": f'"{_etag(path)}"', "x-repo-commit": commit_of(name), "accept-ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["range"] or "")
        if wanted:
            begin, end = int(wanted[1]), int(wanted[2] or len(data) - 1) + 1
            headers["content-range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            data, status = data[begin:end], 206
        if self.command == "GET":
            self.server.record(name, file)
        self._write(status, data, headers)

    def _refuse(self, status: int, code: str) -> None:
        self._write(status, b"{}", {"x-error-code": code, "x-error-message": code})

    def _write(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Generator[LocalHub]:
    """A hub which this process fetches from, into this cache."""
    hub = LocalHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    point_at(monkeypatch, hub.url)
    use_cache(monkeypatch, cache)
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does to a process that begins."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def use_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, offline: bool = False) -> None:
    """What another process, with a cache of its own, begins with: HF_HUB_CACHE, HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    from specsot.checkpoint.hub import fetch_description, fetch_model

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    fetch_model.cache_clear()
    fetch_description.cache_clear()
