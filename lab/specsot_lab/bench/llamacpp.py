"""`specsot bench llamacpp`: SpecSoT and llama.cpp, measured in turns.

llama.cpp comes from the wheel `xllamacpp`, in an environment of its own: `python -m venv peer; peer/bin/pip
install xllamacpp`. The order of the ways is reversed in every other round, so that whatever else the machine
does affects all ways alike.

`by script` is what a client of llama.cpp can do without SpecSoT: it sends the prompt of our plan, then the
prompts of all its points at once to the server's slots, each with the length that our answer had.
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
from typing import TYPE_CHECKING, Any, Final
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

# Simultaneous requests of the second llama.cpp server, and questions that are sent at once.
SLOTS: Final = 6
# Ways that write a plan and its branches, which the script is compared with.
PLANNED: Final = ("branches", "both", "by script")
# Program of the llama.cpp server: its arguments are the model, the number of slots and that of threads. It
# ends with its standard input.
SERVER: Final = """
import sys, xllamacpp
wanted = xllamacpp.CommonParams()
wanted.model.path, wanted.n_parallel, wanted.port = sys.argv[1], int(sys.argv[2]), 0
wanted.n_ctx = 2048 * wanted.n_parallel
wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(wanted)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""
# The questions, one for each round, in turns.
QUESTIONS: Final = (
    "How can I sleep better?",
    "What are the benefits of regular exercise?",
    "What should I pack for a weekend of hiking?",
    "How do I prepare for a job interview?",
    "How can I reduce stress?",
    "What are the benefits of reading books?",
)


# Answers a question, and returns the timed answer.
Way = Callable[[str], PairedAnswer]


@dataclass(frozen=True, slots=True)
class PeerTask:
    """What is compared with llama.cpp.

    peer: Python executable of the environment that has xllamacpp.
    gguf: Model file that llama.cpp reads: a chat model with ChatML.
    fleet: Options with which SpecSoT reads the same model.
    kinds: Precisions of SpecSoT, such as "int8" or "bf16".
    ways: Names of the ways of SpecSoT that are measured.
    threads: Threads of each side.
    tokens: Tokens of a direct answer; a plan gets four times as many.
    rounds: Maximum number of rounds, with one question each.
    seconds: No round starts that would probably end later than so many seconds after the beginning.
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
    """Yield the address of a llama.cpp server that runs within the context. The process exits with a message
    if the server does not start.

    python: Python executable of the environment that has xllamacpp.
    gguf: The model file.
    slots: Number of simultaneous requests.
    threads: Number of threads that it computes with.

    The exit status is 1, and the message advises to install xllamacpp. The server is killed at the end of the
    context, also by an error. Its error output is discarded.
    """
    command = [python, "-c", SERVER, gguf, str(slots), str(threads)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, text=True, **pipes) as server:
        assert server.stdout is not None
        address = next((line.split()[1] for line in server.stdout if line.startswith("at ")), None)
        if address is None:
            sys.exit(f"{python} serves no {gguf}: is xllamacpp installed there?")
        try:
            yield address
        finally:
            server.kill()


def ask(address: str, prompt: str | Sequence[int], tokens: int, reuse_prompt: bool = False) -> int:
    """Return the number of tokens that llama.cpp wrote. It decodes greedily and ignores ends of the answer,
    so that it writes `tokens` tokens.

    address: The server's address.
    prompt: Text or token ids.
    tokens: Number of tokens to write.
    reuse_prompt: True if the slot may reuse the KV of the prompt that it has.

    Returns the number that the server reports. Raises urllib.error.URLError if the server cannot be reached
    or refuses the request.
    """
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": reuse_prompt,
    }
    request = Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        return json.load(answer)["tokens_predicted"]


def chat_prompt(question: str) -> str:
    """Return the prompt of a question in ChatML.

    question: What the user asks.
    """
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def ask_all_slots(address: str, tokens: int) -> int:
    """Send SLOTS questions at once, and return the number of tokens of all answers.

    address: The server's address.
    tokens: Tokens of each answer.
    """
    with ThreadPoolExecutor(SLOTS) as pool:
        return sum(pool.map(ask, [address] * SLOTS, map(chat_prompt, QUESTIONS), [tokens] * SLOTS))


@dataclass(frozen=True, slots=True)
class Script:
    """The requests of one planned answer.

    plan: The prompt of the plan in token ids, and its number of tokens.
    branches: The same for each branch; at least one.
    """

    plan: tuple[Sequence[int], int]
    branches: tuple[tuple[Sequence[int], int], ...]

    def run(self, address: str) -> int:
        """Let llama.cpp write the plan, then all branches at once; return the number of tokens.

        address: The server's address.

        The prompts' KV may be reused between the requests. A request that fails raises its error.
        """
        written = ask(address, *self.plan, reuse_prompt=True)
        with ThreadPoolExecutor(len(self.branches)) as pool:
            futures = [pool.submit(ask, address, *branch, reuse_prompt=True) for branch in self.branches]
        return written + sum(future.result() for future in futures)


def script_of(prompts: Prompts, request: Ask, answer: Answer) -> Script:
    """Return requests with the same prompts and the same lengths as a planned answer of SpecSoT.

    prompts: Makes the prompts of plans and branches.
    request: The request to SpecSoT.
    answer: Its answer; points without a branch are left out.

    Each branch is as long as the answer's branch was, headings not included. An answer without branches gives
    a script without branches, which `Script.run` cannot run.
    """
    conversation = prompts.plan(messages_of(request), rules_of(request, prompts.listed))
    points = [branch.point for branch in answer.branches]
    turns = (conversation.branch(point, points, (), point.length) for point in points)
    lengths = (branch.tokens for branch in answer.branches)
    plan = conversation.skeleton.tokens, answer.statistics.plan_tokens
    return Script(plan, tuple((turn.tokens, length) for turn, length in zip(turns, lengths)))


def ways_of(kind: str, task: PeerTask, slots_address: str) -> dict[str, Way]:
    """Return the ways of SpecSoT in one precision that the task names, and the script, each by its name with
    the precision before it.

    kind: The precision: a quantization, such as "int8", or a dtype.
    task: What is compared.
    slots_address: Address of the llama.cpp server with SLOTS slots.

    The names are those of `task.ways`: "plain" (direct, no drafts), "drafts", "branches" (planned, no
    drafts), "both" and "by script"; unknown names are ignored. A precision that begins with "int" is a
    quantization. The model is loaded once by this call. Raises ModelError or HeadMismatch if it cannot be
    loaded.
    """
    from specsot import SpecSoT

    precision = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    models = models_of(task.fleet)
    model = SpecSoT.from_pretrained(
        str(models.base), str(models.draft) if models.draft else None, **precision
    )

    def request_options(mode: str, **settings: Any) -> dict[str, Any]:
        """Return the options of a request. A plan gets four times as many tokens as a direct answer.

        mode: "direct" or "sot".
        settings: Further options.
        """
        return {"mode": mode, "max_new_tokens": task.tokens * (4 if mode == "sot" else 1), **settings}

    def way(mode: str, **settings: Any) -> Way:
        """Return a way that answers in this mode.

        mode: "direct" or "sot".
        settings: Further options of each request.
        """

        def answer(question: str) -> PairedAnswer:
            """Return SpecSoT's answer to a question, timed. The tokens of headings do not count.

            question: What the user asks.
            """
            watch = Stopwatch()
            answer = model.generate_sync(question, **request_options(mode, **settings))
            statistics = answer.statistics
            seconds = watch.seconds
            tokens = statistics.completion_tokens - statistics.heading_tokens
            branch_seconds = statistics.phases.get("branches")
            branches = None
            if branch_seconds and statistics.branches:
                branches = Sample(tokens - statistics.plan_tokens, branch_seconds)
            return PairedAnswer(answer.text, Sample(tokens, seconds), branches, statistics.steps)

        return answer

    prompts = Prompts(models.base, Text(models.base))

    def script(question: str) -> PairedAnswer:
        """Return the script's answer to a question, timed. The script's prompts are new to the llama.cpp
        server. The time of SpecSoT's answer, which gives the lengths, does not count.

        question: What the user asks.
        """
        planned = request_options("sot", drafter="none")
        answer = model.generate_sync(question, **planned)
        script = script_of(prompts, ask_of(question, **planned), answer)
        return peer_way(lambda _: script.run(slots_address))(question)

    undrafted = {"drafter": "none"}
    ways = {"plain": way("direct", **undrafted), "drafts": way("direct")}
    ways |= {"branches": way("sot", **undrafted), "both": way("sot"), "by script": script}
    return {f"{kind} {name}": way for name, way in ways.items() if name in task.ways}


def peer_way(answer: Callable[[str], int]) -> Way:
    """Return a way of llama.cpp.

    answer: Answers a question, and returns the number of tokens that it wrote.

    The way's answer has no branches and no number of steps.
    """

    def way(question: str) -> PairedAnswer:
        """Return the answer to a question, timed, without its text.

        question: What the user asks.
        """
        watch = Stopwatch()
        tokens = answer(question)
        return PairedAnswer("", Sample(tokens, watch.seconds))

    return way


def measure(task: PeerTask, output: Path | None) -> int:
    """Measure all ways in turns, publish one table, and return the exit status 0. Ratios are those of answers
    of the same round. The first round is not counted.

    task: What is compared.
    output: The JSON file; None: the table is only printed.

    There are at most `task.rounds` rounds that count; the run ends after the first one that leaves too little
    of `task.seconds` for another round as long. The process exits with a message if a llama.cpp server does
    not start.
    """
    import torch

    torch.set_num_threads(task.threads)
    total_watch = Stopwatch()
    with (
        serve(task.peer, task.gguf, 1, task.threads) as single_address,
        serve(task.peer, task.gguf, SLOTS, task.threads) as slots_address,
    ):
        ways: dict[str, Way] = {
            "llama.cpp": peer_way(lambda question: ask(single_address, chat_prompt(question), task.tokens)),
            f"llama.cpp, {SLOTS} slots": peer_way(lambda question: ask_all_slots(slots_address, task.tokens)),
        }
        for kind in task.kinds:
            ways |= ways_of(kind, task, slots_address)
        answers: dict[str, list[PairedAnswer]] = {name: [] for name in ways}
        # The first round is not counted.
        for number in range(task.rounds + 1):
            watch = Stopwatch()
            for name in order(tuple(ways), number):
                answer = ways[name](QUESTIONS[number % len(QUESTIONS)])
                answers[name] += [answer] if number else []
            if number and total_watch.seconds + watch.seconds > task.seconds:
                break
    rows = rows_of(answers)
    page = f"{markdown(COLUMNS, rows)}\n\n{len(answers['llama.cpp'])} rounds. {NOTE}"
    settings = {
        "gguf": task.gguf,
        "model": task.fleet.model,
        "threads": task.threads,
        "tokens": task.tokens,
    }
    publish("llamacpp", settings, rows, page, output)
    return 0


# The footnote of the table.
NOTE: Final = "Branch phase: of its own plain. Of the script: its seconds for the whole request over ours."


def rows_of(answers: Mapping[str, Sequence[PairedAnswer]]) -> list[Row]:
    """Return a row for each way, relative to llama.cpp, to SpecSoT without speculation in the same precision,
    and to the script. A figure is None if there is nothing to compare with.

    answers: The timed answers of each way, round by round.

    "peer", "plain" and "branches" are ratios of tokens per second; "script" is the seconds of the script
    divided by those of the way, and only for the ways of PLANNED; "per_step" is the median tokens per forward
    pass, None if the passes are unknown. Raises KeyError without a way "llama.cpp".
    """
    rows: list[Row] = []
    for name, own_answers in answers.items():
        kind = name.split()[0]
        baseline_pairs = list(zip(own_answers, answers.get(f"{kind} plain", ())))
        script_pairs = zip(own_answers, answers.get(f"{kind} by script", ()))
        peer_pairs = zip(own_answers, answers["llama.cpp"])
        rates = [answer.whole.rate for answer in own_answers]
        if not name.endswith(PLANNED):
            script_pairs = ()
        rows.append({
            "name": name,
            "rate": statistics.median(rates),
            "seconds": statistics.median(answer.whole.seconds for answer in own_answers),
            "range": f"{min(rates):.1f} .. {max(rates):.1f}",
            "peer": _median(answer.whole.rate / peer.whole.rate for answer, peer in peer_pairs),
            "plain": _median(answer.whole.rate / plain.whole.rate for answer, plain in baseline_pairs),
            "script": _median(script.whole.seconds / answer.whole.seconds for answer, script in script_pairs),
            "per_step": _median(answer.whole.tokens / answer.steps for answer in own_answers if answer.steps),
            "branches": _median(
                answer.branches.rate / plain.whole.rate for answer, plain in baseline_pairs if answer.branches
            ),
        })  # fmt: skip
    return rows


def _median(ratios: Iterable[float]) -> float | None:
    """Return the median; None if there are no ratios.

    ratios: The ratios, one for each round.
    """
    listed = list(ratios)
    return statistics.median(listed) if listed else None


# The columns of the table.
COLUMNS: Final = (
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
