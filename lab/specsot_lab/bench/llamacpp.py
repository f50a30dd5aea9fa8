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
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

from specsot.service.runtime_env import set_runtime_defaults
from specsot_app.bench.core.pairing import order
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
    "Explain how a bicycle stays upright.",
    "What should I pack for a week in the mountains?",
    "How do vaccines work?",
    "Give me tips for a job interview.",
    "Why is the sky blue?",
)
Way = Callable[[str], int]  # answers a question; how many tokens were written


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

        def answer(question: str) -> int:
            found = model.generate_sync(question, mode=mode, max_new_tokens=most, **settings).statistics
            return found.completion_tokens

        return answer

    alone = {"drafter": "none"}
    every = {"plain": way("direct", **alone), "drafts": way("direct")}
    every |= {"branches": way("sot", **alone), "both": way("sot")}
    return {f"{kind} {name}": one for name, one in every.items() if name in given.ways.split(",")}


def rate(way: Way, question: str) -> float:
    """Tokens a second, as the caller sees it."""
    watch = Stopwatch()
    return way(question) / watch.seconds


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
    given = reader.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    with (
        serve(given.peer, given.gguf, 1, given.threads) as one,
        serve(given.peer, given.gguf, SLOTS, given.threads) as six,
    ):
        ways: dict[str, Way] = {
            "llama.cpp": lambda question: ask(one, question, given.tokens),
            f"llama.cpp, {SLOTS} slots": lambda question: ask_six(six, given.tokens),
        }
        for kind in given.kinds.split(","):
            ways |= ways_of(kind, given)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(given.rounds + 1):  # the first warms up
            for name in order(tuple(ways), number):
                found = rate(ways[name], QUESTIONS[number % len(QUESTIONS)])
                rates[name] += [found] if number else []
    write(rates)


def write(rates: dict[str, list[float]]) -> None:
    """One Markdown table; ratios are of the same rounds."""
    base = rates["llama.cpp"]
    lines = ["| | tokens/s: median | range | ratio to llama.cpp |", "|---|---:|---:|---:|"]
    for name, found in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(found, base))
        spread = f"{min(found):.1f} .. {max(found):.1f}"
        lines.append(f"| {name} | {statistics.median(found):.1f} | {spread} | {ratio:.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    set_runtime_defaults()
    main()
