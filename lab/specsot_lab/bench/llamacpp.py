"""`specsot bench llamacpp`: SpecSoT beside llama.cpp, in turns.

llama.cpp comes from the wheel `xllamacpp`, in an environment of its own: `python -m venv peer; peer/bin/pip
install xllamacpp`. Ways take turns of reversed order, so that whatever else the machine does falls on all.

`by script` is what a client of llama.cpp can do without SpecSoT: it sends our plan's prompt, then the prompts
of all its points at once to the server's slots, each with the length that our answer had.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from specsot.params import Ask
from specsot_app.core.ask import ask_of
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_bench.core.pairing import Sample, order
from specsot_bench.core.tables import Column, Row, figure, markdown, text
from specsot_bench.results import Stopwatch, publish
from specsot_lab.bench.pairs import PairedAnswer
from specsot_master.core.limits import rules_of
from specsot_master.prompts import Prompts, messages_of
from specsot_master.text import Text

if TYPE_CHECKING:
    from specsot_app.core.ask import Answer

SLOTS = 6
PLANNED = ("branches", "both", "by script")
SERVER = """
import sys, xllamacpp
wanted = xllamacpp.CommonParams()
wanted.model.path, wanted.n_parallel, wanted.port = sys.argv[1], int(sys.argv[2]), 0
wanted.n_ctx = 2048 * wanted.n_parallel
wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(wanted)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""
QUESTIONS = (
    "How can I sleep better?",
    "What are the benefits of regular exercise?",
    "What should I pack for a weekend of hiking?",
    "How do I prepare for a job interview?",
    "How can I reduce stress?",
    "What are the benefits of reading books?",
)


Way = Callable[[str], PairedAnswer]  # answers a question


@dataclass(frozen=True, slots=True)
class PeerTask:
    """What is compared with llama.cpp.

    peer: Python of the environment that has xllamacpp. gguf: file that llama.cpp reads, a chat model with
        ChatML. fleet: the same model, as SpecSoT reads it. kinds: precisions of SpecSoT. ways: names of our
        ways to write. threads: of each side. tokens: of a direct answer; a plan gets four times as many.
        rounds: a question each. seconds: no round begins that would end later.
    """

    peer: str
    gguf: str
    fleet: FleetOptions
    kinds: Sequence[str]
    ways: Sequence[str]
    threads: int
    tokens: int
    rounds: int
    seconds: float


@contextmanager
def serve(python: str, gguf: str, slots: int, threads: int) -> Generator[str]:
    """Yield the address of a llama.cpp server that runs within the context. python: of the environment that
    has xllamacpp. gguf: the model. slots: requests at once. threads: it computes with.
    """
    command = [python, "-c", SERVER, gguf, str(slots), str(threads)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, text=True, **pipes) as server:
        assert server.stdout is not None
        told = next((line.split()[1] for line in server.stdout if line.startswith("at ")), None)
        if told is None:
            sys.exit(f"{python} serves no {gguf}: is xllamacpp installed there?")
        try:
            yield told
        finally:
            server.kill()


def ask(address: str, prompt: str | Sequence[int], tokens: int, keep: bool = False) -> int:
    """Return how many tokens llama.cpp wrote: greedy, never at an end, exactly so many. prompt: text or token
    ids. keep: the slot reuses the prompt that it has.
    """
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": keep}
    wanted = Request(f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(wanted) as answer:
        return json.load(answer)["tokens_predicted"]


def in_words(question: str) -> str:
    """Return the prompt of a question in ChatML."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def ask_six(address: str, tokens: int) -> int:
    """Ask SLOTS questions at once, and return the tokens of all answers."""
    with ThreadPoolExecutor(SLOTS) as pool:
        return sum(pool.map(ask, [address] * SLOTS, map(in_words, QUESTIONS), [tokens] * SLOTS))


@dataclass(frozen=True, slots=True)
class Script:
    """The requests of one planned answer: prompts in token ids, and how many tokens each is to write."""

    plan: tuple[Sequence[int], int]
    branches: tuple[tuple[Sequence[int], int], ...]

    def run(self, address: str) -> int:
        """Let llama.cpp write the plan, then all branches at once; return the number of tokens."""
        written = ask(address, *self.plan, keep=True)
        with ThreadPoolExecutor(len(self.branches)) as pool:
            begun = [pool.submit(ask, address, *branch, keep=True) for branch in self.branches]
        return written + sum(one.result() for one in begun)


def script_of(prompts: Prompts, asked: Ask, answer: Answer) -> Script:
    """Return the same prompts as a planned answer of ours had, and the lengths that it had. asked: our
    request. answer: ours.
    """
    conversation = prompts.plan(messages_of(asked), rules_of(asked, prompts.listed))
    points = [branch.point for branch in answer.branches]
    turns = (conversation.branch(point, points, (), point.length) for point in points)
    lengths = (branch.tokens for branch in answer.branches)
    plan = conversation.skeleton.tokens, answer.statistics.plan_tokens
    return Script(plan, tuple((turn.tokens, length) for turn, length in zip(turns, lengths)))


def ways_of(kind: str, given: PeerTask, six: str) -> dict[str, Way]:
    """Return our ways in one precision, by name, and the script that does what its planned answers do on
    llama.cpp. kind: the precision. six: address of the server with SLOTS slots.
    """
    from specsot import SpecSoT

    held = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    found = models_of(given.fleet)
    model = SpecSoT.from_pretrained(str(found.base), str(found.draft) if found.draft else None, **held)

    def asked(mode: str, **settings: Any) -> dict[str, Any]:
        """Return the options of a request; a plan gets four times as many tokens."""
        return {"mode": mode, "max_new_tokens": given.tokens * (4 if mode == "sot" else 1), **settings}

    def way(mode: str, **settings: Any) -> Way:
        """Return a way that answers in this mode with these settings."""

        def answer(question: str) -> PairedAnswer:
            """Return our answer to a question, timed."""
            watch = Stopwatch()
            answer = model.generate_sync(question, **asked(mode, **settings))
            told = answer.statistics
            whole = watch.seconds
            tokens, seconds = told.completion_tokens - told.heading_tokens, told.phases.get("branches")
            branches = Sample(tokens - told.plan_tokens, seconds) if seconds and told.branches else None
            return PairedAnswer(answer.text, Sample(tokens, whole), branches, told.steps)

        return answer

    prompts = Prompts(found.base, Text(found.base))

    def script(question: str) -> PairedAnswer:
        """Return the script's answer to a question, timed. Its prompts are new to the server; the time of our
        own answer does not count.
        """
        planned = asked("sot", drafter="none")
        answer = model.generate_sync(question, **planned)
        script = script_of(prompts, ask_of(question, **planned), answer)
        return theirs(lambda _: script.run(six))(question)

    alone = {"drafter": "none"}
    every = {"plain": way("direct", **alone), "drafts": way("direct")}
    every |= {"branches": way("sot", **alone), "both": way("sot"), "by script": script}
    return {f"{kind} {name}": one for name, one in every.items() if name in given.ways}


def theirs(answer: Callable[[str], int]) -> Way:
    """Return a way of llama.cpp. answer: returns how many tokens it wrote."""

    def way(question: str) -> PairedAnswer:
        """Return the answer to a question, timed; its text is left out."""
        watch = Stopwatch()
        tokens = answer(question)
        return PairedAnswer("", Sample(tokens, watch.seconds))

    return way


def measure(given: PeerTask, output: Path | None) -> int:
    """Measure all ways in turns, publish one table, and return the exit status 0; ratios are of the same
    rounds. output: the JSON file; None: only print.
    """
    import torch

    torch.set_num_threads(given.threads)
    whole = Stopwatch()
    with (
        serve(given.peer, given.gguf, 1, given.threads) as one,
        serve(given.peer, given.gguf, SLOTS, given.threads) as six,
    ):
        ways: dict[str, Way] = {
            "llama.cpp": theirs(lambda question: ask(one, in_words(question), given.tokens)),
            f"llama.cpp, {SLOTS} slots": theirs(lambda question: ask_six(six, given.tokens)),
        }
        for kind in given.kinds:
            ways |= ways_of(kind, given, six)
        found: dict[str, list[PairedAnswer]] = {name: [] for name in ways}
        for number in range(given.rounds + 1):  # the first warms up
            watch = Stopwatch()
            for name in order(tuple(ways), number):
                brought = ways[name](QUESTIONS[number % len(QUESTIONS)])
                found[name] += [brought] if number else []
            if number and whole.seconds + watch.seconds > given.seconds:
                break
    rows = rows_of(found)
    page = f"{markdown(COLUMNS, rows)}\n\n{len(found['llama.cpp'])} rounds. {NOTE}"
    settings = {
        "gguf": given.gguf,
        "model": given.fleet.model,
        "threads": given.threads,
        "tokens": given.tokens,
    }
    publish("llamacpp", settings, rows, page, output)
    return 0


NOTE = "Branch phase: of its own plain. Of the script: its seconds for the whole request over ours."


def rows_of(found: Mapping[str, Sequence[PairedAnswer]]) -> list[Row]:
    """Return a row for each way, relative to llama.cpp, to our plain decoding, and to the script."""
    rows: list[Row] = []
    for name, brought in found.items():
        kind = name.split()[0]
        plain = found.get(f"{kind} plain", ())
        scripted = found.get(f"{kind} by script", ())
        rates = [one.whole.rate for one in brought]
        pairs = list(zip(brought, plain))
        rows.append({
            "name": name,
            "rate": statistics.median(rates),
            "seconds": statistics.median(one.whole.seconds for one in brought),
            "range": f"{min(rates):.1f} .. {max(rates):.1f}",
            "peer": _middle(
                one.whole.rate / other.whole.rate for one, other in zip(brought, found["llama.cpp"])
            ),
            "plain": _middle(one.whole.rate / other.whole.rate for one, other in pairs),
            "script": _middle(
                other.whole.seconds / one.whole.seconds for one, other in zip(brought, scripted)
                if name.endswith(PLANNED)
            ),
            "per_step": _middle(one.whole.tokens / one.steps for one in brought if one.steps),
            "branches": _middle(
                one.branches.rate / other.whole.rate for one, other in pairs if one.branches
            ),
        })  # fmt: skip
    return rows


def _middle(ratios: Iterable[float]) -> float | None:
    """Return the median of the ratios; None without ratios."""
    listed = list(ratios)
    return statistics.median(listed) if listed else None


COLUMNS = (
    text("", "name"),
    figure("tokens/s: median", "rate", 1),
    figure("seconds", "seconds"),
    Column("range", lambda row: row["range"]),
    figure("of llama.cpp", "peer"),
    figure("of its own plain", "plain"),
    figure("of the script", "script"),
    figure("tokens a step", "per_step"),
    figure("branch phase", "branches"),
)
