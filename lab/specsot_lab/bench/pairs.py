"""`specsot bench ablation` and `bench demo`: two ways to write, compared on the same questions.

Each row is measured in paired runs (AB BA AB ...) on fleets that are opened for it. Both sides share one
fleet if they differ only in their requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from specsot.drafting import DraftOptions
from specsot.errors import SpecsotError
from specsot.params import Ask, Message
from specsot_app.core.ask import ask_of
from specsot_app.fleet.demo import is_small
from specsot_app.fleet.opening import FleetClient, open_fleet
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_bench.asking import counting_bar, finished_answer
from specsot_bench.core.methods import window_of
from specsot_bench.core.pairing import Comparison, Sample, turns
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.hf_baseline import HfBaseline
from specsot_bench.plots import OTHER, SAME, bars, picture
from specsot_bench.plots import PLAIN as GREY
from specsot_bench.results import Row, Stopwatch, publish
from specsot_bench.runners import ModelSet
from specsot_lab.bench.stage_switches import RowByRowStage, SingleThread, UncapturedStage
from specsot_master.core.limits import POINT_TOKENS
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.linear import resolve_dtype
from specsot_worker.stage import DecoderStage

# Options by name.
Settings = Mapping[str, Any]

# Tokens of every branch, in rows whose branches are all equally long.
BRANCH_TOKENS: Final = 64
# A request off the topics that the demo model was trained on.
OFF_TOPIC: Final = "Write a long letter to my landlord about a broken window."


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    fleet: Options of the fleet that is opened for the side.
    request: Options of every request, which is a direct answer unless they say otherwise.
    transformers: True if Transformers writes, without a fleet.
    stage: The kind of stages with which a loop in one thread writes; None: a fleet writes.
    """

    fleet: Settings = field(default_factory=dict[str, Any])
    request: Settings = field(default_factory=dict[str, Any])
    transformers: bool = False
    stage: type[DecoderStage] | None = None


@dataclass(frozen=True, slots=True)
class Contrast:
    """A comparison, which is one row, or two rows of the same runs.

    name: Name of the row.
    explanation: What is compared, in words.
    a: The side that is measured.
    b: The side that it is compared with.
    exact: True if both sides must write the same text in fp32.
    head: True if the comparison needs an EAGLE head.
    matches_length: True if the second side writes as many tokens as the first one did.
    aim: The ratio to reach; None: there is no aim.
    branches_aim: The ratio to reach of a second row, in which the first side counts by the phase of its
        branches alone; None: there is no second row.
    branches: True if both sides count by the phase of their branches alone.
    graphs: True if the comparison needs a device that captures graphs.
    """

    name: str
    explanation: str
    a: Side
    b: Side
    exact: bool = False
    head: bool = False
    matches_length: bool = False
    aim: float | None = None
    branches_aim: float | None = None
    branches: bool = False
    graphs: bool = False

    @property
    def has_token_limit(self) -> bool:
        """Return whether answers have as many tokens as the table says. Whole plans have no limit."""
        return self.a.request.get("max_new_tokens", 0) is not None

    @property
    def is_planned(self) -> bool:
        """Return whether at least one side plans its answers."""
        return "sot" in (self.a.request.get("mode"), self.b.request.get("mode"))

    def tokens_of(self, tokens: int) -> int:
        """Return how many tokens both sides write. A limited plan gets at least POINT_TOKENS, because a
        smaller one is refused.

        tokens: The number of tokens that the command line asks for.
        """
        return max(tokens, POINT_TOKENS) if self.is_planned and self.has_token_limit else tokens

    def with_length_in_name(self, tokens: int) -> Contrast:
        """Return this comparison with the number of tokens in its name.

        tokens: The number of tokens.
        """
        return replace(self, name=f"{self.name}, {tokens} tokens")


# A request without drafts.
PLAIN: Settings = {"drafter": "none"}
# A planned request.
PLANNED: Settings = {"mode": "sot"}
# A planned request without a limit of tokens.
WHOLE_PLAN: Settings = {**PLANNED, "max_new_tokens": None}
# A side without drafts.
ALONE: Final = Side(PLAIN)
# A side with the fleet's defaults.
SERVED: Final = Side()

# The rows of `specsot bench ablation` that are always there.
SINGLE: Final = (
    Contrast("drafting", "EAGLE trees against plain decoding", SERVED, ALONE, exact=True, head=True),
    Contrast("adaptive", "trees as large as is profitable, against whole trees", SERVED,
             Side({"tree": "fixed"}), exact=True, head=True),
    Contrast("blend", "n-grams of the sequence join the trees", SERVED,
             Side({"drafting": DraftOptions(blend=False)}), exact=True, head=True),
    Contrast("ngram", "n-grams of the sequence alone, against plain decoding", Side({"drafter": "ngram"}),
             ALONE, exact=True),
    Contrast("plan", "a plan and its branches against a direct answer", Side(PLAIN, PLANNED), ALONE),
    Contrast("parallel", "parallel branches against one after the other", Side(PLAIN, PLANNED),
             Side(PLAIN, {**PLANNED, "max_parallel": 1})),
    Contrast("batched", "branches as a batch against packed rows", Side(PLAIN, PLANNED),
             Side({**PLAIN, "layout": "packed"}, PLANNED), exact=True),
    Contrast("kv-moves", "accepted KV rows moved together, against one by one", Side(stage=DecoderStage),
             Side(stage=RowByRowStage), exact=True, head=True),
    Contrast("graphs", "captured graphs of forward passes, against kernel by kernel",
             Side(stage=DecoderStage), Side(stage=UncapturedStage), exact=True, head=True, graphs=True),
    Contrast("int8", "weights of 8 bits", Side({**PLAIN, "quantization": "int8"}), ALONE),
    Contrast("int8-kv", "KV rows of 8 bits", Side({**PLAIN, "kv_cache_dtype": "int8"}), ALONE),
)  # fmt: skip


def ablation_of(chains: Sequence[int], windows: Sequence[int]) -> tuple[Contrast, ...]:
    """Return the comparisons of each optimisation switched on with the same switched off.

    chains: Numbers of drafts of the chains that trees are compared with, a row each.
    windows: Tokens that attention sees, sinks included, a row each.
    """
    return (
        *SINGLE,
        *(_tree_contrast(chain, f"tree, K={chain}" if len(chains) > 1 else "tree") for chain in chains),
        *(
            _window_contrast(window, f"window {window}" if len(windows) > 1 else "window")
            for window in windows
        ),
    )


def _tree_contrast(chain: int, name: str) -> Contrast:
    """Return the comparison of whole trees with chains.

    chain: Number of drafts of a chain.
    name: Name of the row.

    The trees are the first side and have a fixed size. The row must have the same text on both sides, and
    needs a head.
    """
    chained = Side({"drafting": DraftOptions(mode="linear", depth=chain, tuner="fixed")})
    explanation = f"whole EAGLE trees against chains of {chain}"
    return Contrast(name, explanation, Side({"tree": "fixed"}), chained, exact=True, head=True)


def _window_contrast(num_tokens: int, name: str) -> Contrast:
    """Return the comparison of attention to a window with attention to all tokens.

    num_tokens: Tokens that attention sees, sinks included.
    name: Name of the row.

    Both sides are without drafts. The first side's requests keep that many sinks and recent tokens; the
    second side's keep all.
    """
    window = window_of(num_tokens)
    request = {"sinks": window.sinks, "recent": window.recent}
    explanation = f"{window.sinks} sinks and {window.recent} recent tokens against all"
    return Contrast(name, explanation, Side(PLAIN, request), ALONE)


def _branch_turns_side(drafter: str) -> Side:
    """Return the side that writes the branches of a plan one by one.

    drafter: The drafter that requests choose.
    """
    return Side(request={**WHOLE_PLAN, "drafter": drafter, "max_parallel": 1})


def _letter_side(drafter: str) -> Side:
    """Return the side that writes a letter off the demo model's topics, at temperature 0.7.

    drafter: The drafter that requests choose.
    """
    return Side(request={"drafter": drafter, "prompt": OFF_TOPIC, "temperature": 0.7})


def _plan_contrast(drafter: str, equal: bool) -> Contrast:
    """Return the comparison of a plan with a direct answer of as many tokens.

    drafter: The drafter of the plan.
    equal: True if every branch writes BRANCH_TOKENS, so that a model's habit of short points does not count.

    The direct answer is written without drafts. The row needs a head only if `drafter` is "eagle". The aim is
    a ratio of 3.0 for whole answers, and 4.5 for a second row that counts only the phase of the branches.
    With `equal`, branches also ignore the model's end of text.
    """
    name = f"sot ({drafter}{', equal branches' if equal else ''}) / direct plain"
    limits = {"ignore_eos": True, "max_branch_tokens": BRANCH_TOKENS} if equal else {}
    planned = Side(request={**WHOLE_PLAN, "drafter": drafter, **limits})
    return Contrast(name, "a plan against a direct answer of as many tokens", planned, Side(request=PLAIN),
                    head=drafter == "eagle", matches_length=True, aim=3.0, branches_aim=4.5)  # fmt: skip


# A fleet of two stages and the other services, each in a process of its own.
APART: Final = {"kind": "processes", "stages": 2}
# A fleet of two stages in this process.
INSIDE: Final = {"stages": 2}
# The rows of `specsot bench demo`.
DEMO: Final = (
    Contrast("plain / Transformers generate", "the same prompts, as many tokens", ALONE,
             Side(transformers=True), aim=1.6),
    Contrast("eagle / plain, branch turns", "branches one by one", _branch_turns_side("eagle"),
             _branch_turns_side("none"), head=True, aim=1.4, branches=True),
    Contrast("eagle / plain, off its topics", "a letter, at temperature 0.7",
             _letter_side("eagle"), _letter_side("none"), head=True, aim=0.97),
    *(_plan_contrast(drafter, equal) for drafter in ("none", "eagle") for equal in (False, True)),
    Contrast("processes / in-process, sot", "two stages and a drafter",
             Side(APART, WHOLE_PLAN), Side(INSIDE, WHOLE_PLAN), head=True, aim=0.85),
    Contrast("processes / in-process, plain", "two stages", Side(APART, PLAIN), Side(INSIDE, PLAIN),
             aim=0.75),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What is measured.

    table: Name of the benchmark.
    fleet: Options of the fleet, before those of a side.
    models: Directories of the models, and their precision.
    questions: One question for each pair, from the first on again if there are more pairs.
    contrasts: The comparisons.
    samples: Pairs of each row.
    lengths: Tokens of a direct answer, a row each.
    """

    table: str
    fleet: FleetOptions
    models: ModelSet
    questions: Sequence[str]
    contrasts: Sequence[Contrast]
    samples: int = 5
    lengths: Sequence[int] = (128,)

    @property
    def rows(self) -> list[tuple[Contrast, int]]:
        """Return every comparison with its number of tokens, for each length that makes a difference to it.
        With several lengths, the length is part of the row's name.

        With one length, names stay as they are. Each comparison has one row for each different number of
        tokens that `Contrast.tokens_of` gives for the lengths; a comparison without a limit of tokens has one
        row, with the first length, and no length in its name.
        """
        if len(self.lengths) == 1:
            return [(contrast, contrast.tokens_of(self.lengths[0])) for contrast in self.contrasts]
        return [
            (contrast.with_length_in_name(tokens) if contrast.has_token_limit else contrast, tokens)
            for contrast in self.contrasts
            for tokens in dict.fromkeys(
                map(contrast.tokens_of, self.lengths if contrast.has_token_limit else self.lengths[:1])
            )
        ]

    def ask(self, pair: int, side_options: Settings, tokens: int) -> Ask:
        """Return the request of one pair, at temperature 0 unless the side has another one. Direct answers
        ignore the model's end; the branches of a plan do not.

        pair: The pair's number, from which the question and the seed follow.
        side_options: Options of the side; "prompt" replaces the question.
        tokens: Maximum number of tokens of the answer.

        "mode" is "direct" unless the side names another one; the question is number `pair` modulo the number
        of questions, and `pair` is the seed. The side's options replace each of these defaults, `tokens`
        included; a side may set "max_new_tokens" to None for no limit. Raises InvalidRequest for an unknown
        option, or for a value that can never work.
        """
        options: dict[str, Any] = {
            "mode": "direct",
            "temperature": 0.0,
            "max_new_tokens": tokens,
            "seed": pair,
            **side_options,
        }
        question = options.pop("prompt", self.questions[pair % len(self.questions)])
        return ask_of(question, **{"ignore_eos": options["mode"] == "direct", **options})


def measure(options: PairOptions, output: Path | None) -> int:
    """Measure all rows, and publish a table, JSON and a plot. Return the exit status 0. If the measurement is
    interrupted, the rows so far are published.

    options: What is measured.
    output: The JSON file; None: the table is only printed.

    An interruption by a signal ends the run after its rows are published; without any row, nothing is
    published. An error that ends the measurement passes through after publishing.
    """
    quiet_logs()
    rows = list[Row]()
    try:
        run_until_signal(_measure(options, rows))
    finally:
        # What was measured before an interruption is published.
        if rows:
            _publish(options, rows, output)
    return 0


def _publish(options: PairOptions, rows: Sequence[Row], output: Path | None) -> None:
    """Publish what was measured.

    options: What is measured.
    rows: The rows so far.
    output: The JSON file; None: the table is only printed.

    Besides the table on stdout and the JSON file, a picture of the ratios is drawn beside the JSON file if
    there is one.
    """

    def draw(stem: Path) -> None:
        """Draw the ratios.

        stem: Path of the picture without its suffix.
        """
        draw_ratios(rows, f"specsot bench {options.table}", stem.with_suffix(".png"))

    publish(options.table, settings_of(options), rows, page_of(rows), output, draw)


async def _measure(options: PairOptions, rows: list[Row]) -> None:
    """Measure all rows, and append each to `rows` as soon as it is measured.

    options: What is measured.
    rows: Gets the rows.

    A progress bar on stderr counts the runs: for each row, 2 sides times (samples + 1), the unmeasured run
    included. The bar does not advance for skipped rows.
    """
    runs = len(options.rows) * 2 * (options.samples + 1)
    with counting_bar(sys.stderr, options.table, runs) as advance:
        for contrast, tokens in options.rows:
            rows += await measure_contrast(contrast, tokens, options, advance)


async def measure_contrast(
    contrast: Contrast, tokens: int, options: PairOptions, advance: Callable[[], None]
) -> list[Row]:
    """Return one row, or two rows of the same runs. If the comparison cannot be measured, return one row
    whose entry "skipped" says why.

    contrast: The comparison.
    tokens: Tokens of an answer.
    options: Models, questions and number of pairs.
    advance: Called after each run.

    A comparison is skipped if it needs a head and none is given, if it needs graphs and the device is the
    CPU, or if a SpecsotError ends it. "same" is the number of pairs with equal texts if the comparison is
    exact, and None otherwise.
    """
    name_fields: Row = {
        "name": contrast.name,
        "what": contrast.explanation,
        "exact": contrast.exact,
        "max_new_tokens": tokens,
    }
    if contrast.head and options.models.head is None:
        return [{**name_fields, "skipped": "needs --draft-model, an EAGLE head"}]
    if contrast.graphs and torch.device(options.models.device).type == "cpu":
        return [{**name_fields, "skipped": "needs --device cuda: graphs are captured on GPUs alone"}]
    try:
        pairs = await _paired_answers(contrast, tokens, options, advance)
    except SpecsotError as error:
        return [{**name_fields, "skipped": str(error)}]
    same = sum(a.text == b.text for a, b in pairs) if contrast.exact else None
    return [{**name_fields, **row, "same": same} for row in rows_of(_comparisons(contrast, pairs))]


@dataclass(frozen=True, slots=True)
class PairedAnswer:
    """One answer of a pair.

    text: The text that was written.
    whole: Tokens of the merged answer, and wall-clock seconds.
    branches: The same for the phase of the branches alone; None without branches.
    steps: Forward passes of the whole answer; None if unknown.
    first: Seconds until the first token; None if unknown.
    """

    text: str
    whole: Sample
    branches: Sample | None = None
    steps: int | None = None
    first: float | None = None


def _comparisons(contrast: Contrast, pairs: Sequence[tuple[PairedAnswer, PairedAnswer]]) -> list[Comparison]:
    """Return the comparison of the pairs, or two: that of the whole answers, and that of the branches' phase.

    contrast: The comparison, from which names and aims are read.
    pairs: The answers of both sides, at least one pair.

    There are two if the contrast has a `branches_aim`: named "<name>, whole" and "<name>, branches"; in the
    second one, only the first side counts by its branches, and the other side by its whole answers. Otherwise
    there is one, by branches on both sides if `contrast.branches` is True. An answer without branches counts
    as a whole.
    """

    def side(answers: Sequence[PairedAnswer], branches: bool) -> tuple[Sample, ...]:
        """Return the samples of one side.

        answers: The answers of the side.
        branches: True for the phase of the branches, if an answer has any; False for the whole answer.
        """
        return tuple(answer.branches if branches and answer.branches else answer.whole for answer in answers)

    a_answers, b_answers = zip(*pairs)
    name = contrast.name
    by_branches = contrast.branches
    if contrast.branches_aim is None:
        return [Comparison(name, side(a_answers, by_branches), side(b_answers, by_branches), contrast.aim)]
    return [
        Comparison(f"{name}, whole", side(a_answers, False), side(b_answers, False), contrast.aim),
        Comparison(f"{name}, branches", side(a_answers, True), side(b_answers, False), contrast.branches_aim),
    ]


# Writes the answer of a pair: its arguments are the pair's number and the number of tokens.
Write = Callable[[int, int], Awaitable[PairedAnswer]]


async def _paired_answers(
    contrast: Contrast, num_tokens: int, options: PairOptions, advance: Callable[[], None]
) -> list[tuple[PairedAnswer, PairedAnswer]]:
    """Return the pairs of answers. Each side runs once before, unmeasured, so that no cold run is counted.

    contrast: The comparison.
    num_tokens: Tokens of an answer.
    options: Models, questions and number of pairs.
    advance: Called after each run.

    If `contrast.matches_length` is True, the second side writes as many tokens as the first one wrote for the
    same pair. The list has `options.samples` pairs; the sides take turns in the order AB BA AB. Raises
    SpecsotError if a fleet cannot be opened or an answer fails. Fleets and processes are closed before the
    function returns.
    """
    async with AsyncExitStack() as stack:
        writers = await _writers_of(contrast, options, stack)
        answers: tuple[dict[int, PairedAnswer], dict[int, PairedAnswer]] = {}, {}

        async def write(pair: int, side_index: int) -> PairedAnswer:
            """Return one answer. If the second side must match the length of the first, it gets as many
            tokens as the first side wrote for the same pair.

            pair: The pair's number.
            side_index: 0 for the first side, 1 for the second.
            """
            tokens = num_tokens
            if side_index and contrast.matches_length:
                first_answer = answers[0].get(pair) or await writers[0](pair, tokens)
                tokens = first_answer.whole.tokens
            return await writers[side_index](pair, tokens)

        for side_index in (0, 1):
            await write(0, side_index)
            advance()
        for pair, side_index in turns((0, 1), options.samples):
            answers[side_index][pair] = await write(pair, side_index)
            advance()
    return [(answers[0][pair], answers[1][pair]) for pair in range(options.samples)]


async def _writers_of(contrast: Contrast, options: PairOptions, stack: AsyncExitStack) -> list[Write]:
    """Return what writes for each side. Both sides share a fleet if they need the same one.

    contrast: The comparison.
    options: Models, questions and the fleet.
    stack: Closes the fleets.

    The list has one function for each side, in order. A side with `stage` writes in one thread without a
    fleet; a side with `transformers` in a process of Transformers. All other sides open a fleet with the
    options of `options.fleet`, which those of the side replace. If the first side has no `stage`, the second
    side's is ignored. Raises SpecsotError if a fleet cannot be opened.
    """
    fleets: dict[str, FleetClient] = {}
    writers: list[Write] = []
    loop = SingleThread(options.models) if contrast.a.stage else None
    for side in (contrast.a, contrast.b):
        if loop and side.stage:
            writers.append(_loop_writer(loop, side.stage, options))
            continue
        if side.transformers:
            writers.append(_transformers_writer(options, stack))
            continue
        if (key := repr(side.fleet)) not in fleets:
            fleets[key] = await open_fleet(replace(options.fleet, **dict(side.fleet)))
            stack.push_async_callback(fleets[key].close)
        writers.append(_fleet_writer(fleets[key], side, options))
    return writers


def _fleet_writer(fleet: FleetClient, side: Side, options: PairOptions) -> Write:
    """Return a function that writes with a fleet.

    fleet: The fleet.
    side: The side, whose options its requests have.
    options: Questions and their options.

    The function returns the text, the number of tokens of the merged answer with the seconds from sending to
    the last event, and the same for the phase "branches" if the answer had one. Raises SpecsotError if the
    request fails.
    """

    async def write(pair: int, tokens: int) -> PairedAnswer:
        """Return the answer of a pair, timed.

        pair: The pair's number.
        tokens: Tokens of the answer.
        """
        watch = Stopwatch()
        finished = await finished_answer(fleet, options.ask(pair, side.request, tokens))
        seconds = watch.seconds
        statistics = finished.statistics
        phase = statistics.phases.get("branches")
        branches = None if phase is None else Sample(statistics.merged_tokens, phase)
        return PairedAnswer(finished.text, Sample(statistics.merged_tokens, seconds), branches)

    return write


def _loop_writer(loop: SingleThread, stage: type[DecoderStage], options: PairOptions) -> Write:
    """Return a function that writes in one thread with stages of one kind.

    loop: The loop of that thread.
    stage: The kind of stages.
    options: Questions.

    The question of a pair is number `pair` modulo the number of questions. The loop writes in a worker
    thread, and the answer has no branches.
    """

    async def write(pair: int, tokens: int) -> PairedAnswer:
        """Return the answer of a pair, timed.

        pair: The pair's number.
        tokens: Tokens of the answer.
        """
        question = options.questions[pair % len(options.questions)]
        text, written, seconds = await asyncio.to_thread(loop.write, question, tokens, stage)
        return PairedAnswer(text, Sample(written, seconds))

    return write


def _transformers_writer(options: PairOptions, stack: AsyncExitStack) -> Write:
    """Return a function that writes with Transformers, in a process of its own, without quantization, after
    the same prompts.

    options: Questions and models.
    stack: Ends the process.

    The process is started by this call and loads the model. The question of a pair is number `pair` modulo
    the number of questions. The text of an answer is "", and it has no branches.
    """
    base = options.models.base
    dtype = resolve_dtype(options.models.dtype, options.models.device)
    prompts = Prompts(base, Text(base))
    transformers = stack.enter_context(closing(HfBaseline(base, dtype, options.models.device)))

    async def write(pair: int, tokens: int) -> PairedAnswer:
        """Return the answer of a pair, timed, without its text.

        pair: The pair's number.
        tokens: Tokens of the answer.
        """
        question = options.questions[pair % len(options.questions)]
        output = await asyncio.to_thread(
            transformers.write, prompts.chat((Message("user", question),)), tokens
        )
        return PairedAnswer("", Sample(len(output.tokens), output.seconds))

    return write


def settings_of(options: PairOptions) -> Row:
    """Return the settings of the run, by name.

    options: What is measured.

    "model" is "demo" for the demo model and else the name of its directory; "draft_model" is None without a
    head.
    """
    models = options.models
    numbers = ("dtype", "quantization", "kv_cache_dtype", "draft_dtype", "draft_quantization", "device")
    return {
        "model": "demo" if is_small(models.base) else models.base.name,
        "draft_model": models.head and models.head.name,
        "samples": options.samples,
        "tokens": list(options.lengths),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    } | {name: getattr(models, name) for name in numbers}


def page_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, with a column of aims if a row has one. Without rows, the table has only
    its heading.

    rows: The measured rows; skipped rows have a reason in place of figures.

    A row has an aim only if its ratio to reach is neither None nor 0; the column comes after the quartiles.
    """
    aim_columns = [figure("aim", "aim")] if any(row.get("aim") for row in rows) else []
    return markdown([*COLUMNS[:4], *aim_columns, *COLUMNS[4:]], rows)


def _quartiles(row: Mapping[str, Any]) -> str:
    """Return the quartiles of a row's ratios, such as "1.20 .. 1.35".

    row: A measured row, whose entry "quartiles" has both.
    """
    lower, upper = row["quartiles"]
    return f"{lower:.2f} .. {upper:.2f}"


def _rate(heading: str, side: int) -> Column:
    """Return a column of the tokens per second of one side.

    heading: Heading of the column.
    side: 0 for the first side, 1 for the second.
    """
    return Column(heading, lambda row: f"{row['tokens_per_second'][side]:.1f}")


# The columns of the table, without the aim.
COLUMNS: Final = (
    text("", "name"),
    text("what", "what"),
    figure("ratio", "ratio"),
    Column("quartiles", _quartiles),
    _rate("tok/s", 0),
    _rate("against", 1),
    Column("same", lambda row: "-" if row["same"] is None else f"{row['same']}/{row['pairs']}"),
)


def draw_ratios(rows: Sequence[Row], title: str, file: Path) -> None:
    """Draw a bar for the ratio of each row, with its quartiles. Skipped rows are left out.

    rows: The measured rows.
    title: Title of the picture.
    file: The PNG file.

    Rows whose sides must write the same text, and rows that do not say so, have one colour, all others
    another. A line marks the ratio 1. An existing file is replaced.
    """
    measure_contrast = [row for row in rows if "skipped" not in row]
    values = [row["ratio"] for row in measure_contrast]
    colours = [SAME if row.get("exact", True) else OTHER for row in measure_contrast]
    names = [row["name"] for row in measure_contrast]
    quartiles = [row["quartiles"] for row in measure_contrast]
    with picture(file, title, (8, 0.4 * len(measure_contrast) + 1.6)) as (panel,):
        bars(panel, names, values, [f"{value:.2f}" for value in values], colours, quartiles)
        panel.axvline(1, color=GREY, linewidth=0.8)


def rows_of(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return a row of figures for each comparison: ratio, quartiles, rates, tokens.

    comparisons: The comparisons, each with at least one pair.
    """
    return [
        {
            "name": comparison.name,
            "ratio": round(comparison.ratio, 3),
            "quartiles": [round(value, 3) for value in comparison.spread],
            "aim": comparison.aim,
            "pairs": len(comparison.a),
            "tokens_per_second": [round(rate, 1) for rate in comparison.rates],
            "tokens": [sum(s.tokens for s in comparison.a), sum(s.tokens for s in comparison.b)],
        }
        for comparison in comparisons
    ]
