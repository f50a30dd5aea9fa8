"""SpecSoT beside llama.cpp, in turns: `python -m specsot_lab.bench.llamacpp --help`.

llama.cpp comes from the wheel `xllamacpp`, in an environment of its own: `python -m venv peer; peer/bin/pip
install xllamacpp`. Ways take turns of reversed order, so that whatever else the machine does falls on all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from specsot.service.runtime_env import set_runtime_defaults
from specsot_app.bench.core.pairing import order
from specsot_app.bench.core.tables import Column, Row, figure, markdown, text
from specsot_app.bench.stopwatch import Stopwatch

SLOTS = 6
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


@dataclass(frozen=True, slots=True)
class AnswerRate:
    """What a question brought.

    rate:        tokens a second, as the caller sees it.
    branch_rate: the same of the time in which branches are written, where there are any.
    """

    rate: float
    tokens_per_lap: float | None = None
    branch_rate: float | None = None


Way = Callable[[str], AnswerRate]  # answers a question


@contextmanager
def serve(python: str, gguf: str, slots: int, threads: int) -> Generator[str]:
    """A llama.cpp server; its address."""
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


def ask(address: str, question: str, tokens: int) -> int:
    """Greedy, never at an end: exactly so many tokens."""
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    wanted = Request(f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(wanted) as answer:
        return json.load(answer)["tokens_predicted"]


def ask_six(address: str, tokens: int) -> int:
    """All questions at once."""
    with ThreadPoolExecutor(SLOTS) as pool:
        return sum(pool.map(ask, [address] * SLOTS, QUESTIONS, [tokens] * SLOTS))


def ways_of(kind: str, given: argparse.Namespace) -> dict[str, Way]:
    """Ours, of one precision."""
    from specsot import SpecSoT

    held = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    model = SpecSoT.from_pretrained(given.model, draft_model=given.draft_model, **held)

    def way(mode: str, **settings: Any) -> Way:
        most = given.tokens * (4 if mode == "sot" else 1)

        def answer(question: str) -> AnswerRate:
            watch = Stopwatch()
            told = model.generate_sync(question, mode=mode, max_new_tokens=most, **settings).statistics
            tokens, seconds = told.completion_tokens - told.heading_tokens, told.phases.get("branches")
            branches = (tokens - told.plan_tokens) / seconds if seconds and told.branches else None
            return AnswerRate(tokens / watch.seconds, tokens / told.laps, branches)

        return answer

    alone = {"drafter": "none"}
    every = {"plain": way("direct", **alone), "drafts": way("direct")}
    every |= {"branches": way("sot", **alone), "both": way("sot")}
    return {f"{kind} {name}": one for name, one in every.items() if name in given.ways.split(",")}


def theirs(answer: Callable[[str], int]) -> Way:
    """A way of llama.cpp that tells how many tokens it wrote."""

    def way(question: str) -> AnswerRate:
        watch = Stopwatch()
        return AnswerRate(answer(question) / watch.seconds)

    return way


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--peer", required=True, help="Python of the environment that has xllamacpp")
    reader.add_argument("--gguf", required=True, help="what llama.cpp reads: a chat model with ChatML")
    reader.add_argument("--model", required=True, help="the same model, as SpecSoT reads it")
    reader.add_argument("--draft-model", help="its head, for the ways `drafts` and `both`")
    reader.add_argument("--kinds", default="fp32,bf16,int8,int4")
    reader.add_argument("--ways", default="plain", help="of plain,drafts,branches,both")
    reader.add_argument("--threads", type=int, default=2)
    reader.add_argument("--tokens", type=int, default=64)
    reader.add_argument("--rounds", type=int, default=6)
    reader.add_argument("--minutes", type=float, default=60.0, help="no round begins that would end later")
    given = reader.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    whole = Stopwatch()
    with (
        serve(given.peer, given.gguf, 1, given.threads) as one,
        serve(given.peer, given.gguf, SLOTS, given.threads) as six,
    ):
        ways: dict[str, Way] = {
            "llama.cpp": theirs(lambda question: ask(one, question, given.tokens)),
            f"llama.cpp, {SLOTS} slots": theirs(lambda question: ask_six(six, given.tokens)),
        }
        for kind in given.kinds.split(","):
            ways |= ways_of(kind, given)
        found: dict[str, list[AnswerRate]] = {name: [] for name in ways}
        for number in range(given.rounds + 1):  # the first warms up
            watch = Stopwatch()
            for name in order(tuple(ways), number):
                brought = ways[name](QUESTIONS[number % len(QUESTIONS)])
                found[name] += [brought] if number else []
            if number and whole.seconds + watch.seconds > 60 * given.minutes:
                break
    write(found)


def write(found: dict[str, list[AnswerRate]]) -> None:
    """One Markdown table; ratios are of the same rounds."""
    rows: list[Row] = []
    for name, brought in found.items():
        plain = found.get(f"{name.split()[0]} plain", ()) if " " in name else ()
        rates, pairs = [one.rate for one in brought], list(zip(brought, plain))
        rows.append({
            "name": name,
            "rate": statistics.median(rates),
            "range": f"{min(rates):.1f} .. {max(rates):.1f}",
            "peer": _middle(one.rate / other.rate for one, other in zip(brought, found["llama.cpp"])),
            "plain": _middle(one.rate / other.rate for one, other in pairs),
            "per_lap": _middle(one.tokens_per_lap for one in brought if one.tokens_per_lap),
            "branches": _middle(one.branch_rate / other.rate for one, other in pairs if one.branch_rate),
        })  # fmt: skip
    sys.stdout.write(f"{markdown(COLUMNS, rows)}\n")
    sys.stdout.write(f"Rounds: {len(found['llama.cpp'])}. Branch phase: of its own plain.\n")


def _middle(ratios: Iterable[float]) -> float | None:
    listed = list(ratios)
    return statistics.median(listed) if listed else None


COLUMNS = (
    text("", "name"),
    figure("tokens/s: median", "rate", 1),
    Column("range", lambda row: row["range"]),
    figure("of llama.cpp", "peer"),
    figure("of its own plain", "plain"),
    figure("tokens a lap", "per_lap"),
    figure("branch phase", "branches"),
)


if __name__ == "__main__":
    set_runtime_defaults()
    main()
