"""`make clients`: real clients, pinned, against a ring that is started for them; prints their table.

    python -m tests.clients [--model DIR --draft-model DIR] [--write] [--changed] [--record FILE] [CLIENT ...]

Without a model it is the demo pair, with which everything but sense can be tried. What a registry lacks here
is left out in one line. --write puts the table into docs/clients.md, with a digest of the endpoints;
--changed
asks by a few clients, and only where that digest is another one now. --record keeps what clients sent, for
tests/http/test_clients.py. `agents` alone asks by Codex and Claude Code, whose prompts are too long for the
pair: before a scripted ring.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients import page
from tests.clients.page import AGENTS, HERE, NODE, ROOT, Row
from tests.clients.recording import Recorder, proxy

ENVIRONMENT = ROOT / "build" / "clients"
DEMO = ROOT / "models" / "demo"
SECONDS = 600  # of one command's checks; they take some where nothing hangs
READY = re.compile(r"API\s+(?P<url>\S+/v1)")
GRPC = re.compile(r"--master (?P<at>\S+)")
DEBIANS_GO = Path("/usr/share/gocode")  # where golang-google-grpc-dev has it


@dataclass(frozen=True)
class Place:
    """Where the ring is. tokenizer: its model's directory."""

    url: str
    grpc: str
    model: str
    tokenizer: Path


# --- environments: made once, kept in build/clients ---


@functools.cache
def python_of(requirements: str) -> Path | None:
    """The interpreter of an environment with these packages; None where they cannot be had."""
    folder, wanted = ENVIRONMENT / Path(requirements).stem, HERE / requirements
    mark = folder / requirements
    if mark.is_file() and mark.read_bytes() == wanted.read_bytes():
        return folder / "bin" / "python"
    uv = str(Path(sys.executable).with_name("uv"))
    steps = [
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [
            *(uv, "pip", "install", "--quiet", "--python", str(folder)),
            *("--override", str(HERE / "overrides.txt"), "-r", str(wanted)),
        ],
    ]
    if not all(installs(requirements, step) for step in steps):
        return None
    shutil.copy(wanted, mark)
    return folder / "bin" / "python"


def installs(what: str, command: Sequence[str]) -> bool:
    """Whether it did; why not, in one line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{what} cannot be installed here: {last_line(done.stderr)}", flush=True)
    return not done.returncode


@functools.cache
def node_of() -> Path | None:
    """A folder with node's packages and our script beside them; None where they cannot be had."""
    folder = ENVIRONMENT / "node"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "sdks.mjs", folder)
    wanted, mark = HERE / "package.json", folder / "package.json"
    if mark.is_file() and mark.read_bytes() == wanted.read_bytes():
        return folder
    shutil.copy(wanted, mark)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    if not shutil.which("npm") or not installs("package.json", install):
        mark.unlink()
        return None
    return folder


# --- the ring ---


@contextmanager
def ring(model: Path, draft: Path | None) -> Iterator[Place]:
    """Master, workers and drafter as processes, until the checks are over."""
    command = [
        sys.executable,
        "-m",
        "specsot",
        "serve",
        "--port",
        "0",
        "--http-port",
        "0",
        "--name",
        "served",
    ]
    command += ["--model", str(model), *(["--draft-model", str(draft)] if draft else ["--drafter", "none"])]
    ENVIRONMENT.mkdir(parents=True, exist_ok=True)
    with (
        (ENVIRONMENT / "ring.txt").open("w") as log,
        subprocess.Popen(
            [*command, "--stages", "1"], stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
        ) as fleet,
    ):
        assert fleet.stdout is not None
        try:
            url = at = None
            while not (url and at):
                line = fleet.stdout.readline()
                if not line:
                    raise SystemExit(f"the ring did not start: see {log.name}")
                url, at = READY.search(line) or url, GRPC.search(line) or at
            threading.Thread(target=fleet.stdout.read, daemon=True).start()
            yield Place(url["url"], at["at"], "served", model)
        finally:
            fleet.terminate()


# --- what is run ---


def lines_of(command: Sequence[str | Path], **more: str) -> list[Row]:
    """Checks that print a line of JSON each."""
    told = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=SECONDS, check=False, env=more or None
    )
    rows = [Row(**json.loads(line)) for line in told.stdout.splitlines() if line.startswith("{")]
    if told.returncode and not rows:
        rows = [Row(str(command[0]), "", "fails", last_line(told.stderr))]
    return rows


def last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or [""])[-1][:300]


def absent(*clients: str, why: str = "its packages cannot be installed here") -> list[Row]:
    return [Row(client, "", "not run", why) for client in clients]


def python_sdks(place: Place, only: Sequence[str]) -> list[Row]:
    python = python_of("requirements-few.txt" if set(only) <= set(QUICK) else "requirements.txt")
    if python is None:
        return absent(*only)
    return lines_of([python, HERE / "sdks.py", place.url, place.model, *only])


def node_sdks(place: Place) -> list[Row]:
    folder = node_of()
    if folder is None:
        return absent(*(client for client in NODE if client != "buf curl"))
    return lines_of(["node", folder / "sdks.mjs", place.url, place.model, place.grpc, ROOT / "protos"])


def buf_curl(place: Place) -> list[Row]:
    folder = node_of()
    if folder is None:
        return absent("buf curl")
    curl = [folder / "node_modules" / ".bin" / "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    service = f"http://{place.grpc}/specsot.v1.Master"
    asked = json.dumps(
        {"prompt": "What is the sky?", "mode": "MODE_DIRECT", "limits": {"max_new_tokens": 24}}
    )
    return [
        ran("buf curl", "--list-services", [*curl, "--list-services", f"http://{place.grpc}"], "Master"),
        ran("buf curl", "--list-methods", [*curl, "--list-methods", f"http://{place.grpc}"], "Generate"),
        ran("buf curl", "Generate", [*curl, "-d", asked, f"{service}/Generate"], "finished"),
    ]


def go_grpc(place: Place) -> list[Row]:
    if not shutil.which("go") or not (DEBIANS_GO / "src" / "google.golang.org" / "grpc").is_dir():
        return absent("Go gRPC", why="no Debian packages golang-go, golang-google-grpc-dev here")
    folder = ENVIRONMENT / "go"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "client.go", folder)
    where = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GOPATH": str(DEBIANS_GO), "GO111MODULE": "off"}
    return lines_of(["go", "run", folder / "client.go", place.grpc], **where)


def lm_eval(place: Place) -> list[Row]:
    """Multiple choice by log-likelihood, and free text by both endpoints; tasks of our own."""
    python = python_of("requirements-harnesses.txt")
    if python is None:
        return absent("lm-eval")
    with tempfile.TemporaryDirectory() as folder:
        for task in (HERE / "tasks").iterdir():
            text = task.read_text(encoding="utf-8").replace("TASKS", folder)
            (Path(folder) / task.name).write_text(text, encoding="utf-8")
        run = [python.with_name("lm_eval"), "--include_path", folder, "--limit", "4", "--output_path", folder]
        about = f"model={place.model},tokenizer={place.tokenizer},num_concurrent=4"
        plain = [
            *run,
            "--model",
            "local-completions",
            "--model_args",
            f"{about},base_url={place.url}/completions",
        ]
        chat = [*run, "--model", "local-chat-completions", "--apply_chat_template"]
        chat += ["--model_args", f"{about},base_url={place.url}/chat/completions"]
        return [
            ran("lm-eval", "multiple choice", [*plain, "--tasks", "specsot_colours"], "acc"),
            ran("lm-eval", "generate_until", [*plain, "--tasks", "specsot_capitals"], "exact_match"),
            ran("lm-eval", "generate_until, chat", [*chat, "--tasks", "specsot_capitals"], "exact_match"),
        ]


def guidellm(place: Place) -> list[Row]:
    python = python_of("requirements-harnesses.txt")
    if python is None:
        return absent("guidellm")
    command = [python.with_name("guidellm"), "run", "--disable-progress", "--output", "kind=console"]
    command += ["--backend", f"kind=openai_http,target={place.url.removesuffix('/v1')},model={place.model}"]
    command += ["--tokenizer", f"kind=hf_auto,model={place.tokenizer}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    return [ran("guidellm", "6 requests, 2 at a time", command, "Request")]


def ran(client: str, what: str, command: Sequence[str | Path], words: str) -> Row:
    """A command that ends well, and says these words."""
    words_of = [*map(str, command)]
    told = subprocess.run(words_of, capture_output=True, text=True, timeout=SECONDS, check=False)
    if told.returncode or words not in told.stdout:
        return Row(client, what, "fails", last_line(told.stderr) or last_line(told.stdout))
    return Row(client, what, "works")


CODEX = {
    "model": "demo",
    "model_provider": "here",
    "model_providers.here.name": "here",
    "model_providers.here.base_url": "URL/v1",
    "model_providers.here.wire_api": "responses",
    "model_providers.here.env_key": "OPENAI_API_KEY",
}
DONE = "The file holds a word."


def agents() -> list[Row]:
    """Each asks in its default mode, has a file read by a tool of its own, and tells the answer."""
    folder = ENVIRONMENT / "agents"
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    (home / "a.txt").write_text("word\n", encoding="utf-8")
    install = [
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(folder),
        *AGENTS.values(),
    ]
    if not shutil.which("npm") or not installs("agents", install):
        return absent(*AGENTS)
    binaries = folder / "node_modules" / ".bin"
    settings = [word for name, value in CODEX.items() for word in ("-c", f"{name}={value}")]
    codex = [binaries / "codex", "exec", "--skip-git-repo-check", *settings, "What is in a.txt?"]
    claude = [binaries / "claude", "-p", "What is in a.txt?", "--allowedTools", "Read"]
    return [
        agent("Codex", home, codex, {"name": "exec_command", "arguments": {"cmd": "cat a.txt"}}),
        agent("Claude Code", home, claude, {"name": "Read", "arguments": {"file_path": str(home / "a.txt")}}),
    ]


def agent(name: str, home: Path, command: Sequence[str | Path], call: dict[str, object]) -> Row:
    first = f"Let me look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    scripted = [sys.executable, "-m", "tests.clients.scripted", first, DONE]
    with subprocess.Popen(scripted, stdout=subprocess.PIPE, text=True, cwd=ROOT) as endpoint:
        assert endpoint.stdout is not None
        url = endpoint.stdout.readline().strip()
        threading.Thread(target=endpoint.stdout.read, daemon=True).start()
        where = {"PATH": "/usr/bin:/bin", "HOME": str(home), "OPENAI_API_KEY": "none"}
        where |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "demo"}
        where |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        words = [str(word).replace("URL", url) for word in command]
        told = subprocess.run(
            words, env=where, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        endpoint.terminate()
    good = told.returncode == 0 and DONE in told.stdout
    return Row(
        name,
        "a question, a tool of its own, the answer",
        "works" if good else "fails",
        "" if good else last_line(told.stderr),
    )


RUNS: dict[str, Callable[[Place], list[Row]]] = {
    "node": node_sdks,
    "buf": buf_curl,
    "go": go_grpc,
    "lm-eval": lm_eval,
    "guidellm": guidellm,
}


def main() -> int:
    """1 where a client fails; one that cannot be had does not."""
    parser = argparse.ArgumentParser(prog="make clients")
    parser.add_argument("--model", type=Path, default=DEMO / "base")
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("client", nargs="*")
    given = parser.parse_args()
    if given.changed and page.digest() == page.asked_digest():
        print("the endpoints are those that all clients were asked at: see docs/clients.md")
        return 0
    began, chosen = time.monotonic(), QUICK if given.changed else given.client
    rows = show(agents()) if chosen == ["agents"] else ask(given, chosen)
    failed = any(row.state == "fails" for row in rows)
    print(page.HEAD + "\n".join(line for _, line in page.lines(rows)))
    if given.write:
        took = f"{given.model.name}, {page.machine()}, {time.monotonic() - began:.0f} s"
        page.write(rows, ORDER, None if chosen or failed else took)
    return failed


def ask(given: argparse.Namespace, chosen: Sequence[str]) -> list[Row]:
    """By the chosen clients; by all where none is."""
    draft = given.draft_model or (DEMO / "eagle3" if given.model == DEMO / "base" else None)
    rows: list[Row] = []
    with ExitStack() as stack:
        place = stack.enter_context(ring(given.model.resolve(), draft))
        recorder = Recorder(place.url)
        if given.record:
            place = Place(stack.enter_context(proxy(recorder)), place.grpc, place.model, place.tokenizer)
        for client in chosen or PYTHON:
            if client in PYTHON:
                recorder.client = client
                rows += show(python_sdks(place, [client]))
        for client, run in RUNS.items():
            if not chosen or client in chosen:
                recorder.client = client
                rows += show(run(place))
    if given.record:
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in recorder.kept.values())
        given.record.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return rows


PYTHON = ("openai", "openai-agents", "anthropic", "langchain-openai", "litellm", "instructor", "pydantic-ai")
QUICK = ["openai", "anthropic"]
ORDER = (*PYTHON, *NODE, "Go gRPC", "lm-eval", "guidellm", *AGENTS)


def show(rows: list[Row]) -> list[Row]:
    for row in rows:
        print(f"{row.client:18} {row.state:8} {row.what} {row.why}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
