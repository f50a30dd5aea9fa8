"""The command line: one clear line for every bad input, quick light words, pipes."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import structlog

from specsot._version import __version__
from specsot.checkpoint import hub
from specsot.errors import Overloaded
from specsot.params import Ask, Message
from specsot_app.cli import main
from specsot_app.commands.infer import answer
from specsot_app.fleet.options import FleetOptions
from specsot_app.terminal.show import Streams
from tests import forked
from tests.app.stories import MERGED, PLANNED, StoryFleet
from tests.conftest import some
from tests.local_hub import point_at, use_cache


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["infer", " "], "a question is needed: specsot infer"),
        (["infer", "Why?", "--mode", "fast"], "'--mode'"),
        (["infer", "Why?", "--drafter", "magic"], "'--drafter'"),
        (["infer", "Why?", "--dtype", "int3"], "'--dtype'"),
        (["infer", "Why?", "--model-format", "onnx"], "'--model-format'"),
        (["infer", "Why?", "--max-new-tokens", "-2"], "max_new_tokens must be whole, > 0, got -2"),
        (["infer", "Why?", "--max-branch-tokens", "0"], "max_branch_tokens must be whole, > 0"),
        (["infer", "Why?", "--max-parallel", "0"], "max_parallel must be whole, > 0"),
        (["infer", "Why?", "--max-new-tokens", "many"], "'--max-new-tokens'"),
        (["infer", "Why?", "--temperature", "-0.1"], "temperature must be a number >= 0"),
        (["infer", "Why?", "--temperature", "nan"], "temperature must be a number >= 0"),
        (["infer", "Why?", "--top-p", "1.5"], "top_p must be in [0, 1]"),
        (["infer", "Why?", "--top-k", "-1"], "top_k must be whole, in [0"),
        (["infer", "Why?", "--min-p", "-1"], "min_p must be in [0, 1], got -1.0"),
        (["infer", "Why?", "--repetition-penalty", "0"], "repetition_penalty must be in [0.01, 100]"),
        (["infer", "Why?", "--presence-penalty", "3"], "presence_penalty must be in [-2, 2]"),
        (["infer", "Why?", "--frequency-penalty", "nan"], "frequency_penalty must be in [-2, 2], got nan"),
        (["infer", "Why?", "--logit-bias", "5"], "logit_bias must be token ids with numbers, such as"),
        (["infer", "Why?", "--logit-bias", "9999=1", "--drafter", "none"], "logit_bias names token 9999"),
        (["infer", "Why?", "--logprobs", "21"], "logprobs must be whole, in [0, 20]"),
        (["infer", "Why?", "--layers", "0:4"], "layers must be ranges that follow each other"),
        (["infer", "Why?", "--layers", "0:4,4:8", "--stages", "3"], "layers are 2 ranges, stages 3"),
        (["infer", "Why?", "--seed", str(2**63)], "seed must be whole, in"),
        (["infer", "Why?", "--stop", ""], "stop must not hold an empty string"),
        (["infer", "Why?", "--stages", "0"], "stages must be > 0"),
        (["infer", "Why?", "--model", "no/such/where"], "no/such/where: no such file or directory"),
        (
            ["infer", "Why?", "--model", "meta-llama/Llama-3.1-8B"],
            "meta-llama/Llama-3.1-8B: no such file or directory here, HF_HUB_OFFLINE is set, and its config",
        ),
        (["infer", "Why?", "--model", "README.md"], "README.md: a file, but not a GGUF file; SpecSoT reads"),
        (["infer", "Why?", "--draft-model", "tests"], "tests: no config.json in it"),
        (["infer", "Why?", "--aux-layers", "first"], "'--aux-layers': 'first' are no layers"),
        (["infer", "Why?", "--drafter-rope-theta", "-1"], "'--drafter-rope-theta': '-1' is not a number > 0"),
        (["infer", "Why?", "--colour"], "--colour"),
        (["infer", "Why?", "and", "how?"], "and"),
        (["serve", "--model", "no/such/where"], "no/such/where: no such file or directory"),
        (["serve", "--port", "99999"], "port must be in 0..65535, got 99999"),
        (["serve", "--http-port", "-1"], "http_port must be in 0..65535, got -1"),
        (["fly"], "fly"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(arguments, said, capsys, monkeypatch, request) -> None:
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.startswith("specsot: ")
    assert printed.err.count("\n") == 1


def test_what_is_no_model_is_named_as_what_it_is(tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.txt").write_text("words")
    (tmp_path / "smol.Q4_1.gguf").write_bytes(b"GGUF")
    for named, said in [
        (tmp_path / "smol.Q4_1.gguf", "smol.Q4_1.gguf: a broken GGUF header"),
        (tmp_path, "smol.Q4_1.gguf: a broken GGUF header"),
        (
            tmp_path / "texts" / "notes.txt",
            "notes.txt: a file, but not a GGUF file; SpecSoT reads Hugging Face",
        ),
        (tmp_path / "texts", "no config.json in it, and no GGUF file; it holds notes.txt"),
        (tmp_path / "empty", "no config.json in it, and no GGUF file; it is empty"),
    ]:
        assert main(["infer", "Why?", "--model", str(named)]) == 2
        assert said in capsys.readouterr().err


NO_TORCH = "torch and safetensors not installed: pip install 'specsot[model]'\n"


@pytest.mark.parametrize("words", ["infer Why?", "serve", "verify", "bench quick", "bench full"])
def test_without_pytorch_one_line_says_how_to_get_it(words, capsys, monkeypatch) -> None:
    monkeypatch.setattr("specsot.checkpoint.config.find_spec", lambda name: None)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"specsot: {NO_TORCH}"


@pytest.mark.parametrize("member", ["worker", "drafter"])
def test_so_does_a_member_without_pytorch(member, capsys, monkeypatch) -> None:
    monkeypatch.setattr("specsot.checkpoint.config.find_spec", lambda name: None)
    read_config = import_module(f"specsot_{member}.config").read_config
    with pytest.raises(SystemExit, match="2"):
        read_config(["--draft-model", "head"] if member == "drafter" else [])
    assert capsys.readouterr().err == f"specsot-{member}: {NO_TORCH}"


def test_a_question_may_come_through_a_pipe(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("  \n"))
    assert main(["infer"]) == 2
    assert "a question is needed: specsot infer" in capsys.readouterr().err


def test_ctrl_c_is_no_mistake(monkeypatch, capsys) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "read", interrupted, raising=False)
    assert main(["infer"]) == 130
    assert capsys.readouterr() == ("", "\n")


def test_an_answer_that_sigterm_ends_has_the_status_of_that_signal(monkeypatch, capsys) -> None:
    """At once and again, as `timeout` sends it."""

    async def answer(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
        return 0

    module = import_module("specsot_app.commands.infer")
    monkeypatch.setattr(module, "prepared", lambda options, out: options)
    monkeypatch.setattr(module, "answer", answer)
    try:
        assert main(["infer", "Why?"]) == 143
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert capsys.readouterr().out == ""


def test_a_system_message_may_come_before_the_question(monkeypatch) -> None:
    asks: list[Ask] = []

    async def answer(ask: Ask, *_: object) -> int:
        asks.append(ask)
        return 0

    module = import_module("specsot_app.commands.infer")
    monkeypatch.setattr(module, "prepared", lambda options, out: options)
    monkeypatch.setattr(module, "answer", answer)
    assert main(["infer", "Why?", "--system-prompt", "Be short."]) == 0
    assert main(["infer", "Why?"]) == 0
    assert [(ask.prompt, ask.messages) for ask in asks] == [
        (None, (Message("system", "Be short."), Message("user", "Why?"))),
        ("Why?", ()),
    ]


def test_a_missing_head_is_reported_in_one_line(demo_model, capsys) -> None:
    base = str(demo_model / "base")
    head = ["--drafter", "eagle", "--draft-model", base]
    assert main(["infer", "--model", base, *head, "--mode", "direct", "x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith("a small language model drafts by --drafter model\n")


def test_an_address_without_a_process_is_reported_in_one_line(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["health", address]) == 1
        assert main(["info", "--master", address]) == 1
        assert main(["infer", "Why?", "--master", address]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{address}: no process answers\n"
    assert printed.err == f"specsot: no process answers at {address}\n" * 2


def test_an_address_of_the_other_endpoint_is_reported_as_such(capsys) -> None:
    """A page's address in the place of gRPC's."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as page:
        page.settimeout(0.1)  # nothing wakes who waits for a caller on a socket that is closed meanwhile

        def answer() -> None:
            while not over.is_set():
                with suppress(OSError), page.accept()[0] as caller:
                    caller.recv(24)
                    caller.sendall(b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\n\r\n")

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        address = f"127.0.0.1:{page.getsockname()[1]}"
        assert main(["infer", "Why?", "--master", address]) == 1
        assert main(["infer", "Why?", "--master", f"http://{address}"]) == 1
        over.set()
        answering.join(60)
    other = f"specsot: no process answers at {address} (it speaks HTTP/1; gRPC has a port of its own)"
    url = f"specsot: no process answers at http://{address} (it is no HOST:PORT)"
    assert capsys.readouterr().err.splitlines() == [other, url]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (
            ["health", "127.0.0.1:1"],
            ("numpy", "rich", "structlog", "specsot.params", "specsot_app.fleet.opening"),
        ),
        (["infer", ""], ("numpy",)),
        (["--help"], ("numpy",)),
    ],
    ids=("health", "infer", "help"),
)
def test_light_words_load_nothing_heavy(words: list[str], heavy: tuple[str, ...]) -> None:
    """Modules are counted, not seconds: a probe that runs every few seconds is to be done in half of one."""
    code = (
        "import sys; from specsot_app.cli import main; main(sys.argv[1:]);"
        "print([name for name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stderr.splitlines()[-1]))
    assert not loaded & {"torch", "transformers", *heavy}
    if words[0] == "health":
        assert len(loaded) < 450, "it was 387"


@pytest.mark.slow  # two processes each
@pytest.mark.parametrize(
    ("typed", "offered"),
    some([("ser", "serve"), ("infer --mod", "--mode"), ("infer --mode ", "sot"), ("bench q", "quick")], 2, 3),
)
def test_what_is_typed_is_completed_in_bash(typed: str, offered: str) -> None:
    own, words = Path(sys.executable).with_name("specsot"), ["specsot", *typed.split(" ")]
    script = (
        f'eval "$({own} completion bash)" && COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1} && '
        f'_specsot_completion {own} && printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert offered in done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], "serve\tStart a fleet of processes, on this machine or on several."),
        (["infer", "--model", "mod"], "file,mod"),
    ],
)
def test_a_shell_is_offered_lines_of_the_list_and_files(words: list[str], offered: str) -> None:
    asked = {"COMP_WORDS": " ".join(["specsot", *words]), "COMP_CWORD": words[-1]}
    environment = {**os.environ, **asked, "_SPECSOT_COMPLETE": "fish_complete"}
    own = [sys.executable, "-c", "from specsot_app.cli import main; main()"]
    done = subprocess.run(own, env=environment, capture_output=True, text=True, check=True)
    assert offered in done.stdout


async def test_infer_shows_the_answer_and_closes_the_fleet() -> None:
    fleet, streams = StoryFleet(PLANNED), Streams(io.StringIO(), io.StringIO())

    async def opener(wanted: FleetOptions) -> StoryFleet:
        return fleet

    assert await answer(Ask("Why?"), FleetOptions(), streams, "plain", opener) == 0
    assert streams.out.getvalue() == MERGED + "\n"
    assert fleet.closed == 1


async def test_infer_compares_with_an_answer_the_other_way() -> None:
    fleet, streams = StoryFleet(PLANNED), Streams(io.StringIO(), io.StringIO())

    async def opener(wanted: FleetOptions) -> StoryFleet:
        return fleet

    polished = Ask("Why?", polish=True)
    assert await answer(polished, FleetOptions(), streams, "plain", opener, compare=True) == 0
    assert [(ask.mode, ask.polish) for ask in fleet.asks] == [("auto", True), ("direct", False)]
    assert streams.out.getvalue() == f"{MERGED}\n\n---\n\n{MERGED}\n", "one can see where the other begins"
    assert streams.err.getvalue().endswith(
        "0.5 s (44 tokens); planned, by --compare: 0.5 s (44 tokens); "
        "3 branches in 24 steps, drafts brought 2.5 tokens a step\n"
    )


async def test_infer_closes_the_fleet_when_the_request_fails() -> None:
    fleet, streams = StoryFleet(PLANNED[:4], Overloaded("full")), Streams(io.StringIO(), io.StringIO())

    async def opener(wanted: FleetOptions) -> StoryFleet:
        return fleet

    with pytest.raises(Overloaded):
        await answer(Ask("Why?"), FleetOptions(), streams, "json", opener)
    assert fleet.closed == 1
    assert [json.loads(line)["event"] for line in streams.out.getvalue().splitlines()][-1] == "planned"


@pytest.mark.torch
def test_the_demo_model_answers_in_a_pipe() -> None:
    words = [
        "infer",
        "--json",
        "--mode",
        "sot",
        "--max-new-tokens",
        "128",
        "Give an overview of Stages of Sleep.",
    ]
    status, told = forked.ran("specsot_app", *words)
    last = [json.loads(line) for line in told][-1]  # nothing else is written
    assert status == 0
    assert last["event"] == "finished"
    assert last["text"].startswith("## 1. ")
    assert last["statistics"]["completion_tokens"] <= 128


@pytest.mark.slow
@pytest.mark.torch
def test_infer_prints_nothing_but_the_answer_on_stdout(tmp_path, demo_model, monkeypatch, capsys) -> None:
    """Not even what the hub says while models are looked for: programs read the events line by line."""
    # An earlier test of this process may have silenced warnings, or bound the hub's logger for good.
    structlog.reset_defaults()
    monkeypatch.setattr(hub, "log", structlog.get_logger())
    commit, folder = "a" * 40, tmp_path / "hub" / "models--acme--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    shutil.copytree(demo_model / "base", folder / "snapshots" / commit)
    use_cache(monkeypatch, tmp_path / "hub")
    point_at(monkeypatch, "http://127.0.0.1:13")  # an address of its own: each is reported once a process
    words = "infer", "--mode", "direct", "--max-new-tokens", "3", "--model", "acme/tiny"
    assert main([*words, "--json", "Hi"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "finished"
    assert "the hub cannot be reached" in err


def test_a_report_of_a_bug_has_its_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.match(
        rf"specsot {re.escape(__version__)}, Python 3\.\d+\.\d+, (torch \S+|no torch), \S+\n",
        capsys.readouterr().out,
    )


def test_closed_standard_files_are_opened_on_nothing() -> None:
    """What is opened next would have their numbers, and libuv ends a process that closes such a one."""
    code = "import os; from specsot.service.runtime_env import set_runtime_defaults as settle; settle(); "
    code += "os._exit(os.open(os.devnull, os.O_RDONLY))"
    done = subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code])
    assert done.returncode > 2


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8:strict"])
def test_text_that_the_locale_cannot_write_or_read_ends_nothing(encoding: str) -> None:
    """What a pipe brought is refused by name; what is written keeps what the encoding lacks as numbers."""
    code = "from specsot.service.runtime_env import set_runtime_defaults as settle; settle(); "
    code += "print(ascii(input()), '\\u4f60 \\udcff')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b"\xff\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.stderr == b""
    read, written = done.stdout.decode("latin-1").split(" ", 1)
    assert read == (r"'\xff'" if encoding == "latin-1" else r"'\udcff'")
    assert written.endswith("\\udcff\n")
    assert ("\\u4f60" in written) is (encoding == "latin-1")


def test_a_question_that_is_no_text_is_refused_in_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specsot_app", "infer", "--master", "127.0.0.1:1"],
        input=b"caf\xe9",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert (done.returncode, done.stderr) == (2, b"specsot: prompt must be Unicode text, encoded as UTF-8\n")


def test_completion_after_an_unknown_command_offers_nothing() -> None:
    asked = {"COMP_WORDS": "specsot nosuch ", "COMP_CWORD": "2", "_SPECSOT_COMPLETE": "bash_complete"}
    command = [sys.executable, "-m", "specsot_app"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["demo", "fetch", "--dir", "/proc/none"], "/proc/none: No such file or directory"),
        (
            ["infer", "--json-schema", "none.json", "x"],
            "a schema nor a file to read (No such file or directory)",
        ),
        (
            ["serve", "--demo", "small", "--host", "none.invalid", "--insecure"],
            "cannot listen at none.invalid:",
        ),
    ],
)
def test_an_os_error_is_reported_without_its_number(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) in (1, 2)
    told = capsys.readouterr().err
    assert line in told
    assert "Errno" not in told
