"""`specsot bench llamacpp`: SpecSoT and llama.cpp, measured in turns.

llama.cpp comes from the wheel `xllamacpp`, in an environment of its own: `python -m venv peer; peer/bin/pip
install xllamacpp`. The order of the ways is reversed in every other round, so that whatever else the machine
does affects all ways alike.

Both sides get the same prompts as token ids. Of an answer that one client waits for, the rate of decoding is
counted as well: the tokens after the first one by the seconds after the first one, by each side's own clock.

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, repeat
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

# Simultaneous requests of the llama.cpp server that the script uses, and questions that are sent at once.
SLOTS: Final = 6
# Ways that write a plan and its branches, which the script is compared with.
PLANNED: Final = ("branches", "both", "by script")
# Program of the llama.cpp server: its arguments are the model, the number of slots, that of threads, and
# perhaps a small model that drafts. It ends with its standard input.
SERVER: Final = """
import sys, xllamacpp
wanted = xllamacpp.CommonParams()
wanted.model.path, wanted.n_parallel, wanted.port = sys.argv[1], int(sys.argv[2]), 0
wanted.n_ctx = 2048 * wanted.n_parallel
wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = int(sys.argv[3])
if sys.argv[4:]:
    draft = wanted.speculative.draft
    draft.mparams.path = sys.argv[4]
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = int(sys.argv[3])
    wanted.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
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
# Words of the passage that `--prompt-words` puts before a question.
PASSAGE: Final = (
    "The tide follows the moon, rivers carry salt into the sea, and the wind moves the water of the surface."
    " Ships wait for high water, birds look for food on the flats, and people build walls against storms."
)
# Drafters of SpecSoT by the names of ways; None is what it takes by default. "small" is a model of its own.
DRAFTERS: Final = {"drafts": None, "suffix": "suffix", "small": "model", "both": None}

# Answers questions that are sent at once, and returns the timed answer, or all of them as one.
Way = Callable[[Sequence[str]], PairedAnswer]


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
    rounds: Maximum number of rounds, with one question of each client.
    seconds: No round starts that would probably end later than so many seconds after the beginning.
    small_model: GGUF file of a small model with which both sides draft; None: neither does.
    prompt_words: Words of a passage before each question.
    clients: Questions that are sent at once.
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
    small_model: str | None = None
    prompt_words: int = 0
    clients: int = 1

    def questions(self, number: int) -> list[str]:
        """Return the questions of a round, one for each client. No two rounds have the same prompt.

        number: The round's number.
        """
        numbers = range(number * self.clients, (number + 1) * self.clients)
        if self.clients == 1 and not self.prompt_words:
            return [QUESTIONS[one % len(QUESTIONS)] for one in numbers]
        passage = " ".join(islice(cycle(PASSAGE.split()), self.prompt_words))
        return [f"{one + 1}. {passage} {QUESTIONS[one % len(QUESTIONS)]}" for one in numbers]


@contextmanager
def serve(python: str, gguf: str, slots: int, threads: int, draft: str | None = None) -> Generator[str]:
    """Yield the address of a llama.cpp server that runs within the context. The process exits with a message
    if the server does not start.

    python: Python executable of the environment that has xllamacpp.
    gguf: The model file.
    slots: Number of simultaneous requests.
    threads: Number of threads that it computes with.
    draft: GGUF file of the small model that drafts; None: nothing is drafted.

    The exit status is 1, and the message advises to install xllamacpp. The server is killed at the end of the
    context, also by an error. Its error output is discarded.
    """
    command = [python, "-c", SERVER, gguf, str(slots), str(threads), *([draft] if draft else [])]
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


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What llama.cpp reports of an answer.

    tokens: Number of tokens that it wrote.
    first: Seconds until the prompt was read, from when its slot took it.
    """

    tokens: int
    first: float


def ask(address: str, prompt: Sequence[int], tokens: int, reuse_prompt: bool = False) -> PeerAnswer:
    """Let llama.cpp write an answer. It decodes greedily and ignores ends of the answer, so that it writes
    `tokens` tokens.

    address: The server's address.
    prompt: Token ids.
    tokens: Number of tokens to write.
    reuse_prompt: True if the slot may reuse the KV of the prompt that it has.

    Raises urllib.error.URLError if the server cannot be reached or refuses the request.
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
    with urlopen(request) as response:
        answer = json.load(response)
    return PeerAnswer(answer["tokens_predicted"], answer["timings"]["prompt_ms"] / 1000)


def peer_way(address: str, prompts: Prompts, tokens: int) -> Way:
    """Return a way of llama.cpp, whose answers have no text, no branches and no number of steps.

    address: The server's address.
    prompts: Makes the prompts of direct answers.
    tokens: Tokens of each answer.
    """

    def way(questions: Sequence[str]) -> PairedAnswer:
        """Return the answers to questions that are sent at once, timed together.

        questions: What the users ask.
        """
        asked = [prompts.chat(messages_of(Ask(prompt=question))) for question in questions]
        watch = Stopwatch()
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(ask, repeat(address), asked, repeat(tokens)))
        whole = Sample(sum(answer.tokens for answer in answers), watch.seconds)
        return PairedAnswer("", whole, first=answers[0].first if len(answers) == 1 else None)

    return way


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
        written = ask(address, *self.plan, reuse_prompt=True).tokens
        with ThreadPoolExecutor(len(self.branches)) as pool:
            futures = [pool.submit(ask, address, *branch, reuse_prompt=True) for branch in self.branches]
        return written + sum(future.result().tokens for future in futures)


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


def ways_of(kind: str, task: PeerTask, prompts: Prompts, slots_address: str | None) -> dict[str, Way]:
    """Return the ways of SpecSoT in one precision that the task names, and the script, each by its name with
    the precision before it.

    kind: The precision: a quantization, such as "int8", or a dtype.
    task: What is compared.
    prompts: Makes the prompts of plans and branches.
    slots_address: Address of the llama.cpp server with SLOTS slots; None: there is no way of PLANNED.

    The names are those of `task.ways`: "plain" (direct, no drafts), "drafts" (with the default drafter),
    "suffix", "small" (drafts of the small model), "branches" (planned, no drafts), "both" (planned, with the
    default drafter) and "by script"; unknown names are ignored. A precision that begins with "int" is a
    quantization. One model is opened for each drafter; their weights are loaded by this call. Raises
    ModelError or HeadMismatch if they cannot be loaded.
    """
    from specsot import SpecSoT

    precision = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    models = dict[str | None, SpecSoT]()

    def model_of(drafter: str | None) -> SpecSoT:
        """Return the model with this drafter; it is opened at its first use.

        drafter: Name of the drafter; None is the default.
        """
        if drafter not in models:
            draft = task.small_model if drafter == "model" else None if drafter else task.fleet.draft_model
            names = (None if name is None else str(name) for name in (task.fleet.model, draft))
            options = precision | ({"drafter": drafter} if drafter else {})
            models[drafter] = SpecSoT.from_pretrained(*names, **options)
        return models[drafter]

    def request_options(mode: str, **settings: Any) -> dict[str, Any]:
        """Return the options of a request. A plan gets four times as many tokens as a direct answer.

        mode: "direct" or "sot".
        settings: Further options.
        """
        return {"mode": mode, "max_new_tokens": task.tokens * (4 if mode == "sot" else 1), **settings}

    def way(name: str) -> Way:
        """Return a way of SpecSoT.

        name: Its name; those that DRAFTERS lacks draft nothing.
        """
        # What drafts nothing shares the default's model, if that is opened anyway.
        model = model_of(DRAFTERS.get(name, None if {"drafts", "both"} & set(task.ways) else "none"))
        options = request_options("sot" if name in PLANNED else "direct")
        options |= {} if name in DRAFTERS else {"drafter": "none"}

        def answer(questions: Sequence[str]) -> PairedAnswer:
            """Return SpecSoT's answers to questions that are sent at once, timed together. The tokens of
            headings do not count.

            questions: What the users ask.
            """
            watch = Stopwatch()
            with ThreadPoolExecutor(len(questions)) as pool:
                answers = list(pool.map(lambda question: model.generate_sync(question, **options), questions))
            return paired(answers, watch.seconds)

        return answer

    def script(questions: Sequence[str]) -> PairedAnswer:
        """Return the script's answer to the only question, timed. The script's prompts are new to the
        llama.cpp server. The time of SpecSoT's answer, which gives the lengths, does not count.

        questions: What the user asks.
        """
        assert slots_address is not None
        planned = request_options("sot", drafter="none")
        answer = model_of(None).generate_sync(questions[0], **planned)
        requests = script_of(prompts, ask_of(questions[0], **planned), answer)
        watch = Stopwatch()
        tokens = requests.run(slots_address)
        return PairedAnswer("", Sample(tokens, watch.seconds))

    wanted = [name for name in ("plain", *DRAFTERS, "branches") if name in task.ways]
    ways = {name: way(name) for name in wanted} | ({"by script": script} if "by script" in task.ways else {})
    return {f"{kind} {name}": way for name, way in ways.items()}


def paired(answers: Sequence[Answer], seconds: float) -> PairedAnswer:
    """Return answers that were asked for at once as one timed answer. The tokens of headings do not count.

    answers: At least one answer.
    seconds: Wall-clock seconds until all had ended.

    Branches, steps and the first token's seconds are those of an answer that was alone; else None.
    """
    statistics = [answer.statistics for answer in answers]
    tokens = sum(one.completion_tokens - one.heading_tokens for one in statistics)
    if len(answers) > 1:
        return PairedAnswer("", Sample(tokens, seconds))
    (one,) = statistics
    branch_seconds = one.phases.get("branches")
    branches = None
    if branch_seconds and one.branches:
        branches = Sample(tokens - one.plan_tokens, branch_seconds)
    first = None if one.branches else one.seconds_to_first_token
    return PairedAnswer(answers[0].text, Sample(tokens, seconds), branches, one.steps, first)


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
    base = models_of(task.fleet).base
    prompts = Prompts(base, Text(base))
    with ExitStack() as servers:

        def start(slots: int, draft: str | None = None) -> str:
            """Start a llama.cpp server that runs until the measurement's end; return its address.

            slots: Number of simultaneous requests.
            draft: The small model that drafts; None: nothing is drafted.
            """
            return servers.enter_context(serve(task.peer, task.gguf, slots, task.threads, draft))

        ways = {"llama.cpp": peer_way(start(task.clients), prompts, task.tokens)}
        if task.small_model:
            drafting = start(task.clients, task.small_model)
            ways["llama.cpp, the small model drafts"] = peer_way(drafting, prompts, task.tokens)
        slots_address = None
        if set(PLANNED) & set(task.ways):
            slots_address = start(SLOTS)
            all_slots = peer_way(slots_address, prompts, task.tokens)
            ways[f"llama.cpp, {SLOTS} slots"] = lambda _: all_slots(QUESTIONS)
        for kind in task.kinds:
            ways |= ways_of(kind, task, prompts, slots_address)
        answers: dict[str, list[PairedAnswer]] = {name: [] for name in ways}
        # The first round is not counted.
        for number in range(task.rounds + 1):
            watch = Stopwatch()
            for name in order(tuple(ways), number):
                answer = ways[name](task.questions(number))
                answers[name] += [answer] if number else []
                # The table is printed at the end, so that answers must be shown before.
                print(line_of(number, name, answer), file=sys.stderr, flush=True)
            if number and total_watch.seconds + watch.seconds > task.seconds:
                break
    rows = rows_of(answers)
    page = f"{markdown(COLUMNS, rows)}\n\n{len(answers['llama.cpp'])} rounds. {NOTE}"
    settings = {
        "gguf": task.gguf,
        "model": task.fleet.model,
        "threads": task.threads,
        "tokens": task.tokens,
        "prompt_words": task.prompt_words,
        "clients": task.clients,
    }
    publish("llamacpp", settings, rows, page, output)
    return 0


def line_of(number: int, name: str, answer: PairedAnswer) -> str:
    """Return what is known of one answer, such as "round 1, llama.cpp: 64 tokens in 4.2 s, decoding 16.1/s".

    number: The round; the first one, 0, is not counted.
    name: Name of the way.
    answer: The timed answer.
    """
    rate = decoding_rate(answer)
    decoding = f", decoding {rate:.1f}/s" if rate else ""
    steps = f", {answer.steps} steps" if answer.steps else ""
    whole = f"{answer.whole.tokens} tokens in {answer.whole.seconds:.1f} s"
    return f"round {number}, {name}: {whole}{decoding}{steps}"


# The footnote of the table.
NOTE: Final = (
    "Decoding: tokens a second after the first token. Branch phase: of its own plain."
    " Of the script: its seconds for the whole request over ours."
)


def rows_of(answers: Mapping[str, Sequence[PairedAnswer]]) -> list[Row]:
    """Return a row for each way, relative to llama.cpp, to SpecSoT without speculation in the same precision,
    and to the script. A figure is None if there is nothing to compare with.

    answers: The timed answers of each way, round by round.

    "peer", "plain" and "branches" are ratios of tokens per second, and "peer_decoding" is one of "decoding",
    the median of tokens per second after the first token, which is None for several clients and for answers
    with branches; "first" is the median of the seconds until then; "script" is the seconds of the script
    divided by those of the way, and only for the ways of PLANNED; "per_step" is the median tokens per forward
    pass, None if the passes are unknown. Raises KeyError without a way "llama.cpp".
    """
    rows: list[Row] = []
    for name, own_answers in answers.items():
        kind = name.split()[0]
        baseline_pairs = list(zip(own_answers, answers.get(f"{kind} plain", ())))
        script_pairs = zip(own_answers, answers.get(f"{kind} by script", ()))
        peer_pairs = list(zip(own_answers, answers["llama.cpp"]))
        rates = [answer.whole.rate for answer in own_answers]
        if not name.endswith(PLANNED):
            script_pairs = ()
        rows.append({
            "name": name,
            "rate": statistics.median(rates),
            "seconds": statistics.median(answer.whole.seconds for answer in own_answers),
            "range": f"{min(rates):.1f} .. {max(rates):.1f}",
            "first": _median(answer.first for answer in own_answers if answer.first),
            "decoding": _median(map(decoding_rate, own_answers)),
            "peer_decoding": _median(
                own / theirs
                for own, theirs in ((decoding_rate(a), decoding_rate(peer)) for a, peer in peer_pairs)
                if own and theirs
            ),
            "peer": _median(answer.whole.rate / peer.whole.rate for answer, peer in peer_pairs),
            "plain": _median(answer.whole.rate / plain.whole.rate for answer, plain in baseline_pairs),
            "script": _median(script.whole.seconds / answer.whole.seconds for answer, script in script_pairs),
            "per_step": _median(answer.whole.tokens / answer.steps for answer in own_answers if answer.steps),
            "branches": _median(
                answer.branches.rate / plain.whole.rate for answer, plain in baseline_pairs if answer.branches
            ),
        })  # fmt: skip
    return rows


def decoding_rate(answer: PairedAnswer) -> float | None:
    """Return the tokens a second after the first token; None if that one's time is unknown.

    answer: The timed answer.
    """
    if answer.first is None or answer.whole.tokens < 2:
        return None
    return (answer.whole.tokens - 1) / (answer.whole.seconds - answer.first)


def _median(figures: Iterable[float | None]) -> float | None:
    """Return the median of what is not None; None if nothing is left.

    figures: The figures, one for each round.
    """
    listed = [figure for figure in figures if figure is not None]
    return statistics.median(listed) if listed else None


# The columns of the table.
COLUMNS: Final = (
    text("", "name"),
    figure("tokens/s: median", "rate", 1),
    figure("seconds", "seconds"),
    Column("range", lambda row: row["range"]),
    figure("to the first, s", "first"),
    figure("decoding", "decoding", 1),
    figure("of llama.cpp's", "peer_decoding"),
    figure("of llama.cpp", "peer"),
    figure("of its own plain", "plain"),
    figure("of the script", "script"),
    figure("tokens a step", "per_step"),
    figure("branch phase", "branches"),
)
