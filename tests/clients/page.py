"""The table in docs/clients.md: each client, its version, what it asked, when; and at which endpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- written by `make clients ARGS=--write` -->\n", "<!-- until here -->\n"
HEAD = "| client | version | works | refused, fails, or not run | on |\n|---|---|---|---|---|\n"
DIGEST = re.compile(r"endpoints `(?P<digest>\w+)`")
# What clients meet: a change in one of these is a reason to ask all of them again.
DOORS = (
    "services/master/specsot_master/http/*.py",
    "services/master/specsot_master/core/dialects/*.py",
    "lab/specsot_compat/legacy_http.py",
    "services/master/specsot_master/core/dialects/tool_calls/*.py",
    "protos/specsot/v1/master.proto",
    "protos/specsot/v1/values.proto",
    "tests/clients/__main__.py",
    "tests/clients/client.go",
    "tests/clients/sdks.*",
    "tests/clients/requirements*.txt",
    "tests/clients/package.json",
    "tests/clients/tasks/*",
)
# Clients whose package has another name, and those of package.json.
PACKAGES = {"pydantic-ai": "pydantic-ai-slim"}
NODE = {
    "openai (node)": "openai",
    "anthropic (node)": "@anthropic-ai/sdk",
    "ai (Vercel)": "ai",
    "@grpc/grpc-js": "@grpc/grpc-js",
    "buf curl": "@bufbuild/buf",
}
# Those that bring tools of their own, installed for themselves alone.
AGENTS = {"Codex": "@openai/codex@0.169.0", "Claude Code": "@anthropic-ai/claude-code@2.1.330"}


@dataclass(frozen=True)
class Row:
    client: str
    what: str
    state: str
    why: str = ""


def digest() -> str:
    """Of all that clients meet: what it is called, and what is in it."""
    whole = sha256()
    for path in sorted(path for pattern in DOORS for path in ROOT.glob(pattern)):
        whole.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:12]


def asked_digest() -> str | None:
    """Of the endpoints that all clients were asked at, as the page says."""
    found = DIGEST.search(PAGE.read_text(encoding="utf-8"))
    return found and found["digest"]


def lines(rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    """A line for each client, by its name."""
    today = date.today().isoformat()
    for client, own in groupby(rows, lambda one: one.client):
        listed = list(own)
        works = "; ".join(one.what for one in listed if one.state == "works")
        others = "; ".join(_told(one) for one in listed if one.state != "works").replace("|", "/")
        yield client, f"| {client} | {version_of(client)} | {works} | {others} | {today} |"


def _told(row: Row) -> str:
    why = f" ({row.why})" if row.why else ""
    return f"{row.state}: {row.what}{why}" if row.what else f"{row.state}{why}"


def version_of(client: str) -> str:
    """As it is pinned; Debian's own for what comes from there."""
    if client == "Go gRPC":
        if not shutil.which("dpkg-query"):
            return ""
        asked = ["dpkg-query", "-W", "-f", "Debian's ${Version}", "golang-google-grpc-dev"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.partition("-")[0]
    if client in AGENTS or client in NODE:
        pins = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
        return AGENTS[client].rpartition("@")[2] if client in AGENTS else pins[NODE[client]]
    texts = [path.read_text(encoding="utf-8") for path in sorted(HERE.glob("requirements*.txt"))]
    package = re.escape(PACKAGES.get(client, client))
    found = re.search(rf"^{package}(?:\[\w+\])?==(\S+)", "\n".join(texts), re.MULTILINE)
    return found[1] if found else ""


def write(rows: Sequence[Row], order: Sequence[str], how: str | None) -> None:
    """New lines in the place of old ones of the same clients; one that could not be had keeps its old line.

    how: all clients were asked, in words; None: some were, which says nothing of the others.
    """
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, behind = rest.partition(END)
    told, *old = inside.splitlines() or [""]
    table = {line.split(" | ")[0].removeprefix("| "): line for line in old[3:]}
    new, absent = dict(lines(rows)), {row.client for row in rows if row.state == "not run"}
    table |= {client: line for client, line in new.items() if client not in absent & table.keys()}
    listed = sorted(table, key=lambda client: order.index(client) if client in order else len(order))
    if how is not None:
        told = f"All of these but the agents on {date.today().isoformat()}: {how}; endpoints `{digest()}`."
    body = "".join(f"{table[client]}\n" for client in listed)
    PAGE.write_text(f"{before}{BEGIN}{told}\n\n{HEAD}{body}{END}{behind}", encoding="utf-8")


def machine() -> str:
    """This one, in words."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*: (.+)", about)
    return f"{os.cpu_count()} cores" + (f" {found[1].strip()}" if found else "")
