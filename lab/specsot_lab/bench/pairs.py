"""`specsot bench ablation` and `bench demo`: one way to write against another, on the same questions.

Each row is measured in paired runs (AB BA AB ...) on fleets that are opened for it: one where sides
differ in what is asked alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specsot.drafting import DraftOptions
from specsot.errors import SpecsotError
from specsot.params import Ask, Message
from specsot_app.core.ask import ask_of
from specsot_app.fleet.demo import is_small
from specsot_app.fleet.opening import FleetClient, finished_answer, open_fleet
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_app.terminal.show import counting_bar
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

Settings = Mapping[str, Any]

# Tokens of every branch, where all are to be equally long.
BRANCH_TOKENS = 64  # of every branch, where all are to be equally long
OFF_TOPIC = "Write a long letter to my landlord about a broken window."


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    fleet: settings of the fleet that is opened for it. asked: options of every request, which is a direct
        answer unless they say otherwise. rival: Transformers generates, and no fleet is opened. stage: kind
        of the stages with which a loop in one thread writes; None: a fleet writes.
    """

    fleet: Settings = field(default_factory=dict[str, Any])
    asked: Settings = field(default_factory=dict[str, Any])
    rival: bool = False
    stage: type[DecoderStage] | None = None


@dataclass(frozen=True, slots=True)
class Contrast:
    """A row, or two of the same runs.

    exact: both sides must write the same text in fp32. head: it needs an EAGLE head. as_long: the second side
    writes as many tokens as the first one did. aim: of the ratio; branches_aim: of another row, where the
    first side counts by its branches' phase alone. branches: both do. graphs: it needs a device that captures
    graphs.
    """

    name: str
    what: str
    a: Side
    b: Side
    exact: bool = False
    head: bool = False
    as_long: bool = False
    aim: float | None = None
    branches_aim: float | None = None
    branches: bool = False
    graphs: bool = False

    @property
    def bounded(self) -> bool:
        """Whether answers are as long as the table says; those of a whole plan are as long as they come."""
        return self.a.asked.get("max_new_tokens", 0) is not None

    @property
    def planned(self) -> bool:
        """Return whether a side plans its answers."""
        return "sot" in (self.a.asked.get("mode"), self.b.asked.get("mode"))

    def tokens_of(self, tokens: int) -> int:
        """Return how many tokens both sides write if so many are asked for: a plan is refused below
        POINT_TOKENS.
        """
        return max(tokens, POINT_TOKENS) if self.planned and self.bounded else tokens

    def written(self, tokens: int) -> Contrast:
        """Return the row for one of several lengths, with the length in its name."""
        return replace(self, name=f"{self.name}, {tokens} tokens")


PLAIN: Settings = {"drafter": "none"}
PLANNED: Settings = {"mode": "sot"}
WHOLE_PLAN: Settings = {**PLANNED, "max_new_tokens": None}  # as long as it comes
ALONE, SERVED = Side(PLAIN), Side()

SINGLE = (
    Contrast("drafting", "EAGLE trees against plain decoding", SERVED, ALONE, exact=True, head=True),
    Contrast("adaptive", "trees as large as pays, against whole trees", SERVED, Side({"tree": "fixed"}),
             exact=True, head=True),
    Contrast("blend", "n-grams of the text join the trees", SERVED,
             Side({"drafting": DraftOptions(blend=False)}), exact=True, head=True),
    Contrast("ngram", "n-grams of the text alone, against plain decoding", Side({"drafter": "ngram"}), ALONE,
             exact=True),
    Contrast("plan", "a plan and its branches against a direct answer", Side(PLAIN, PLANNED), ALONE),
    Contrast("parallel", "branches side by side against one after the other", Side(PLAIN, PLANNED),
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
    """Return each optimisation on against off. chains: K of those that trees are compared with, a row each.
    windows: tokens that are attended to, sinks included, a row each.
    """
    return (
        *SINGLE,
        *(_tree(chain, f"tree, K={chain}" if len(chains) > 1 else "tree") for chain in chains),
        *(_window(seen, f"window {seen}" if len(windows) > 1 else "window") for seen in windows),
    )


def _tree(chain: int, name: str) -> Contrast:
    """Return the comparison of whole trees with chains of `chain` drafts. name: of the row."""
    chained = Side({"drafting": DraftOptions(mode="linear", depth=chain, tuner="fixed")})
    what = f"whole EAGLE trees against chains of {chain}"
    return Contrast(name, what, Side({"tree": "fixed"}), chained, exact=True, head=True)


def _window(seen: int, name: str) -> Contrast:
    """Return the comparison of a window of `seen` tokens with all tokens. name: of the row."""
    window = window_of(seen)
    asked = {"sinks": window.sinks, "recent": window.recent}
    what = f"{window.sinks} sinks and {window.recent} recent tokens against all"
    return Contrast(name, what, Side(PLAIN, asked), ALONE)


def _turn(drafter: str) -> Side:
    """Return the side that writes the branches of a plan one by one. drafter: what drafts."""
    return Side(asked={**WHOLE_PLAN, "drafter": drafter, "max_parallel": 1})


def _letter(drafter: str) -> Side:
    """Return the side that writes a letter off the demo model's topics, at temperature 0.7. drafter: what
    drafts.
    """
    return Side(asked={"drafter": drafter, "prompt": OFF_TOPIC, "temperature": 0.7})


def _planned(drafter: str, equal: bool) -> Contrast:
    """Return the comparison of a plan with a direct answer of as many tokens.

    drafter: what drafts for the plan. equal: every branch writes BRANCH_TOKENS, so that a model's habit of
        short points does not count.
    """
    name = f"sot ({drafter}{', equal branches' if equal else ''}) / direct plain"
    limits = {"ignore_eos": True, "max_branch_tokens": BRANCH_TOKENS} if equal else {}
    ours = Side(asked={**WHOLE_PLAN, "drafter": drafter, **limits})
    return Contrast(name, "a plan against a direct answer of as many tokens", ours, Side(asked=PLAIN),
                    head=drafter == "eagle", as_long=True, aim=3.0, branches_aim=4.5)  # fmt: skip


APART = {"kind": "processes", "stages": 2}
INSIDE = {"stages": 2}
DEMO = (
    Contrast("plain / Transformers generate", "the same prompts, as many tokens", ALONE, Side(rival=True),
             aim=1.6),
    Contrast("eagle / plain, branch turns", "branches one by one", _turn("eagle"), _turn("none"), head=True,
             aim=1.4, branches=True),
    Contrast("eagle / plain, off its topics", "a letter, at temperature 0.7",
             _letter("eagle"), _letter("none"), head=True, aim=0.97),
    *(_planned(drafter, equal) for drafter in ("none", "eagle") for equal in (False, True)),
    Contrast("processes / in-process, sot", "two stages and a drafter",
             Side(APART, WHOLE_PLAN), Side(INSIDE, WHOLE_PLAN), head=True, aim=0.85),
    Contrast("processes / in-process, plain", "two stages", Side(APART, PLAIN), Side(INSIDE, PLAIN),
             aim=0.75),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What is measured.

    table: name of the benchmark. wanted: the fleet, before a side's settings. models: directories and
        precision. questions: one for each pair, from the first on again if there are more pairs. contrasts:
        the comparisons. samples: pairs of each row. lengths: tokens of a direct answer, a row for each.
    """

    table: str
    wanted: FleetOptions
    models: ModelSet
    questions: Sequence[str]
    contrasts: Sequence[Contrast]
    samples: int = 5
    lengths: Sequence[int] = (128,)

    @property
    def rows(self) -> list[tuple[Contrast, int]]:
        """Every contrast at every length that makes a difference to it."""
        if len(self.lengths) == 1:
            return [(contrast, contrast.tokens_of(self.lengths[0])) for contrast in self.contrasts]
        return [
            (contrast.written(tokens) if contrast.bounded else contrast, tokens)
            for contrast in self.contrasts
            for tokens in dict.fromkeys(
                map(contrast.tokens_of, self.lengths if contrast.bounded else self.lengths[:1])
            )
        ]

    def ask(self, pair: int, side_options: Settings, tokens: int) -> Ask:
        """Return the greedy request of one pair; a plan's branches end by themselves. pair: its number.
        side_options: of the side. tokens: of the answer.
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
    """Measure all rows and publish a table, JSON and a plot; return the exit status 0. output: the JSON file;
    None: only print.
    """
    quiet_logs()
    rows = list[Row]()
    try:
        run_until_signal(_measure(options, rows))
    finally:  # what was measured before an interruption is kept
        if rows:
            _publish(options, rows, output)
    return 0


def _publish(options: PairOptions, rows: Sequence[Row], output: Path | None) -> None:
    """Publish what was measured. rows: measured so far. output: the JSON file, or None."""

    def draw(stem: Path) -> None:
        """Draw the ratios. stem: path without suffix."""
        ratios(rows, f"specsot bench {options.table}", stem.with_suffix(".png"))

    publish(options.table, settings_of(options), rows, page_of(rows), output, draw)


async def _measure(options: PairOptions, rows: list[Row]) -> None:
    """Measure all rows, and append each to `rows` when it is done."""
    runs = len(options.rows) * 2 * (options.samples + 1)
    with counting_bar(sys.stderr, options.table, runs) as step:
        for contrast, tokens in options.rows:
            rows += await measured(contrast, tokens, options, step)


async def measured(
    contrast: Contrast, tokens: int, options: PairOptions, step: Callable[[], None]
) -> list[Row]:
    """Return one row, or two of the same runs; a row that says why, if the comparison cannot be measured.

    contrast: what is compared. tokens: of an answer. options: models, questions and number of pairs. step:
        called after each run.
    """
    named: Row = {
        "name": contrast.name,
        "what": contrast.what,
        "exact": contrast.exact,
        "max_new_tokens": tokens,
    }
    if contrast.head and options.models.head is None:
        return [{**named, "skipped": "needs --draft-model, an EAGLE head"}]
    if contrast.graphs and torch.device(options.models.device).type == "cpu":
        return [{**named, "skipped": "needs --device cuda: graphs are captured on GPUs alone"}]
    try:
        pairs = await _answers(contrast, tokens, options, step)
    except SpecsotError as error:
        return [{**named, "skipped": str(error)}]
    same = sum(a.text == b.text for a, b in pairs) if contrast.exact else None
    return [{**named, **row, "same": same} for row in as_json(_comparisons(contrast, pairs))]


@dataclass(frozen=True, slots=True)
class PairedAnswer:
    """One answer of a pair.

    text: what was written. whole: tokens of the merged answer over wall time. branches: the same over the
        branches' phase alone; None without branches. steps: of the whole answer; None if unknown.
    """

    text: str
    whole: Sample
    branches: Sample | None = None
    steps: int | None = None


def _comparisons(contrast: Contrast, pairs: Sequence[tuple[PairedAnswer, PairedAnswer]]) -> list[Comparison]:
    """Return the comparison of the pairs, or two: of the whole answers and of the branches' phase."""

    def side(answers: Sequence[PairedAnswer], branches: bool) -> tuple[Sample, ...]:
        """Return the samples of one side, by the branches' phase or by the whole answer."""
        return tuple(one.branches if branches and one.branches else one.whole for one in answers)

    ours, theirs = zip(*pairs)
    name = contrast.name
    by_branches = contrast.branches
    if contrast.branches_aim is None:
        return [Comparison(name, side(ours, by_branches), side(theirs, by_branches), contrast.aim)]
    return [
        Comparison(f"{name}, whole", side(ours, False), side(theirs, False), contrast.aim),
        Comparison(f"{name}, branches", side(ours, True), side(theirs, False), contrast.branches_aim),
    ]


Run = Callable[[int, int], Awaitable[PairedAnswer]]  # of a pair's number, and so many tokens


async def _answers(
    contrast: Contrast, num_tokens: int, options: PairOptions, advance: Callable[[], None]
) -> list[tuple[PairedAnswer, PairedAnswer]]:
    """Return the pairs of answers; each side runs once unmeasured before, so that nothing cold is counted.

    contrast: what is compared. num_tokens: of an answer. options: of the run. advance: called after each run.
    """
    async with AsyncExitStack() as stack:
        runs = await _opened(contrast, options, stack)
        found: tuple[dict[int, PairedAnswer], dict[int, PairedAnswer]] = {}, {}

        async def write(pair: int, side_index: int) -> PairedAnswer:
            """Return one answer. pair: its number. side_index: 0 for A, 1 for B."""
            tokens = num_tokens
            if side_index and contrast.as_long:
                longer = found[0].get(pair) or await runs[0](pair, tokens)
                tokens = longer.whole.tokens
            return await runs[side_index](pair, tokens)

        for side_index in (0, 1):
            await write(0, side_index)
            advance()
        for pair, side_index in turns((0, 1), options.samples):
            found[side_index][pair] = await write(pair, side_index)
            advance()
    return [(found[0][pair], found[1][pair]) for pair in range(options.samples)]


async def _opened(contrast: Contrast, options: PairOptions, stack: AsyncExitStack) -> list[Run]:
    """Return what writes on each side; a fleet serves both if they need the same one. stack: closes the
    fleets.
    """
    fleets: dict[str, FleetClient] = {}
    runs: list[Run] = []
    loop = SingleThread(options.models) if contrast.a.stage else None
    for side in (contrast.a, contrast.b):
        if loop and side.stage:
            runs.append(_loop_writer(loop, side.stage, options))
            continue
        if side.rival:
            runs.append(_rival(options, stack))
            continue
        if (key := repr(side.fleet)) not in fleets:
            fleets[key] = await open_fleet(replace(options.wanted, **dict(side.fleet)))
            stack.push_async_callback(fleets[key].close)
        runs.append(_writer(fleets[key], side, options))
    return runs


def _writer(fleet: FleetClient, side: Side, options: PairOptions) -> Run:
    """Return what writes with a fleet. side: its options. options: of the run."""

    async def write(pair: int, tokens: int) -> PairedAnswer:
        """Return the answer of a pair with so many tokens, timed."""
        watch = Stopwatch()
        finished = await finished_answer(fleet, options.ask(pair, side.asked, tokens))
        seconds = watch.seconds
        statistics = finished.statistics
        phase = statistics.phases.get("branches")
        branches = None if phase is None else Sample(statistics.merged_tokens, phase)
        return PairedAnswer(finished.text, Sample(statistics.merged_tokens, seconds), branches)

    return write


def _loop_writer(loop: SingleThread, stage: type[DecoderStage], options: PairOptions) -> Run:
    """Return what writes in one thread with stages of this kind. loop: the thread's loop."""

    async def write(pair: int, tokens: int) -> PairedAnswer:
        """Return the answer of a pair with so many tokens, timed."""
        question = options.questions[pair % len(options.questions)]
        text, written, seconds = await asyncio.to_thread(loop.write, question, tokens, stage)
        return PairedAnswer(text, Sample(written, seconds))

    return write


def _rival(options: PairOptions, stack: AsyncExitStack) -> Run:
    """Return what writes with Transformers, which rounds nothing, after the same prompts. stack: ends its
    process.
    """
    base = options.models.base
    dtype = resolve_dtype(options.models.dtype, options.models.device)
    prompts = Prompts(base, Text(base))
    rival = stack.enter_context(closing(HfBaseline(base, dtype, options.models.device)))

    async def write(pair: int, tokens: int) -> PairedAnswer:
        """Return the answer of a pair with so many tokens, timed; its text is left out."""
        question = options.questions[pair % len(options.questions)]
        output = await asyncio.to_thread(rival.write, prompts.chat((Message("user", question),)), tokens)
        return PairedAnswer("", Sample(len(output.tokens), output.seconds))

    return write


def settings_of(options: PairOptions) -> Row:
    """Return the settings of the run, by name."""
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
    """Return the table in Markdown, with a column of aims if a row has one."""
    aim = [figure("aim", "aim")] if any(row.get("aim") for row in rows) else []
    return markdown([*COLUMNS[:4], *aim, *COLUMNS[4:]], rows)


def _quartiles(row: Mapping[str, Any]) -> str:
    """Return the quartiles of a row's ratios, such as "1.20 .. 1.35"."""
    low, high = row["quartiles"]
    return f"{low:.2f} .. {high:.2f}"


def _rate(heading: str, side: int) -> Column:
    """Return a column of the tokens per second of one side. side: 0 for A, 1 for B."""
    return Column(heading, lambda row: f"{row['tokens_per_second'][side]:.1f}")


COLUMNS = (
    text("", "name"),
    text("what", "what"),
    figure("ratio", "ratio"),
    Column("quartiles", _quartiles),
    _rate("tok/s", 0),
    _rate("against", 1),
    Column("same", lambda row: "-" if row["same"] is None else f"{row['same']}/{row['pairs']}"),
)


def ratios(rows: Sequence[Row], title: str, file: Path) -> None:
    """A bar for each row's `ratio`, with its quartiles; rows that were skipped are left out."""
    measured = [row for row in rows if "skipped" not in row]
    values = [row["ratio"] for row in measured]
    colours = [SAME if row.get("exact", True) else OTHER for row in measured]
    names = [row["name"] for row in measured]
    spread = [row["quartiles"] for row in measured]
    with picture(file, title, (8, 0.4 * len(measured) + 1.6)) as (panel,):
        bars(panel, names, values, [f"{value:.2f}" for value in values], colours, spread)
        panel.axvline(1, color=GREY, linewidth=0.8)


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return a row for each comparison: ratio, quartiles, rates."""
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
