"""`specsot bench demo`: what each of the three levers brings on the demo model, on this machine.

It only asks and counts. Same dtype, threads and prompts on both
sides of every pair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specsot.model.linear import resolve_dtype
from specsot.params import Ask
from specsot_app.bench.core.pairing import Comparison, Run, Sample, as_json, compare
from specsot_app.bench.core.tables import pipes
from specsot_app.bench.hf_baseline import HfBaseline
from specsot_app.bench.results import Row, write_results
from specsot_app.core.ask import ask_of
from specsot_app.fleet.opening import Fleet
from specsot_app.fleet.options import FleetOptions, demo
from specsot_app.runtime import run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_lab.bench.asking import answer, opened
from specsot_master.prompts import Prompts, messages_of
from specsot_master.text import Text

DIRECT_TOKENS = 128
BRANCH_TOKENS = 64  # of every branch, where all are to be equally long
COMPARISONS = 9  # those whose runs are made for them
OFF_TOPIC = "Write a long letter to my landlord about a broken window."


def measure(runs: int, wanted: FleetOptions, output: Path | None) -> int:
    """Run everything, print the table, write JSON where asked to. wanted: the precision of all our fleets."""
    comparisons = run_until_signal(_measure(runs, wanted))
    print(page_of(comparisons))
    if output is not None:
        write_results(output, "demo", settings_of(runs, wanted), as_json(comparisons))
    return 0


@dataclass(frozen=True, slots=True)
class Series:
    """How often each comparison is made, with what fleet, and who hears of every run."""

    runs: int
    wanted: FleetOptions
    step: Callable[[], None]

    async def compare(self, name: str, a: Run, b: Run, aim: float) -> Comparison:
        """Once unmeasured, so that nothing cold is counted; then in pairs."""
        await a(0)
        await b(0)
        return await compare(name, a, b, self.runs, aim, self.step)


async def _measure(runs: int, wanted: FleetOptions) -> list[Comparison]:
    with counting_bar(sys.stderr, "measuring", COMPARISONS * 2 * runs) as step:
        series = Series(runs, wanted, step)
        rooms = _against_transformers, _drafted, _planned, _apart
        return [one for room in rooms for one in await room(series)]


async def _against_transformers(series: Series) -> list[Comparison]:
    """Plain decoding against Transformers generate: the same prompts, the same number of tokens. Transformers
    rounds nothing."""
    text = Text(demo() / "base")
    prompts, dtype = Prompts(demo() / "base", text), resolve_dtype(series.wanted.dtype, "cpu")
    with closing(HfBaseline(demo() / "base", dtype)) as rival:

        async def theirs(pair: int) -> Sample:
            told = rival.write(prompts.chat(messages_of(_direct(pair))), DIRECT_TOKENS)
            return Sample(len(told.tokens), told.seconds)

        async with opened(replace(series.wanted, drafter="none")) as fleet:

            async def ours(pair: int) -> Sample:
                return (await answer(fleet, _direct(pair))).whole()

            return [await series.compare("plain / Transformers generate", ours, theirs, 1.6)]


async def _drafted(series: Series) -> list[Comparison]:
    """EAGLE against plain: branch turns of known topics one by one, and direct answers off them."""
    async with opened(series.wanted) as fleet:

        def branch_turns(drafter: str) -> Run:
            async def run(pair: int) -> Sample:
                return (await answer(fleet, _planned_ask(pair, drafter, max_parallel=1))).branches()

            return run

        def off_topic(drafter: str) -> Run:
            async def run(pair: int) -> Sample:
                ask = ask_of(OFF_TOPIC, mode="direct", drafter=drafter, seed=pair, ignore_eos=True,
                             max_new_tokens=DIRECT_TOKENS, temperature=0.7)  # fmt: skip
                return (await answer(fleet, ask)).whole()

            return run

        return [
            await series.compare(
                "eagle / plain, branch turns", branch_turns("eagle"), branch_turns("none"), 1.4
            ),
            await series.compare(
                "eagle / plain, off its topics", off_topic("eagle"), off_topic("none"), 0.97
            ),
        ]


async def _planned(series: Series) -> list[Comparison]:
    """SoT against direct plain decoding of equally many tokens, with and without the drafter."""
    async with opened(series.wanted) as fleet:
        return [
            one
            for drafter in ("none", "eagle")
            for equal in (False, True)
            for one in await _planned_by(fleet, drafter, equal, series)
        ]


async def _planned_by(fleet: Fleet, drafter: str, equal: bool, series: Series) -> list[Comparison]:
    """One set of runs, looked at whole and in its branch phase alone.

    equal: every branch writes BRANCH_TOKENS, so that the demo model's habit of short points does not count.
    """
    limits = {"ignore_eos": True, "max_branch_tokens": BRANCH_TOKENS} if equal else {}
    phases: list[Sample] = []
    lengths: dict[int, int] = {}

    async def planned(pair: int) -> Sample:
        one = await answer(fleet, ask_of(topic(pair), mode="sot", drafter=drafter, **limits))
        phases.append(one.branches())
        lengths[pair] = one.whole().tokens
        return one.whole()

    async def direct(pair: int) -> Sample:
        if pair not in lengths:
            await planned(pair)
            phases.pop()
        return (await answer(fleet, _direct(pair, lengths[pair]))).whole()

    name = f"sot ({drafter}{', equal branches' if equal else ''}) / direct plain"
    whole = await series.compare(f"{name}, whole", planned, direct, 3.0)
    return [whole, Comparison(f"{name}, branches", tuple(phases[-series.runs :]), whole.b, 4.5)]


async def _apart(series: Series) -> list[Comparison]:
    """Services as processes against the same fleet inside this one: two stages and a drafter each."""
    async with (
        opened(replace(series.wanted, stages=2)) as inside,
        opened(replace(series.wanted, kind="processes", stages=2)) as apart,
    ):

        def sot(fleet: Fleet) -> Run:
            async def run(pair: int) -> Sample:
                return (await answer(fleet, _planned_ask(pair, "eagle"))).whole()

            return run

        def plain(fleet: Fleet) -> Run:
            async def run(pair: int) -> Sample:
                return (await answer(fleet, _direct(pair))).whole()

            return run

        return [
            await series.compare("processes / in-process, sot", sot(apart), sot(inside), 0.85),
            await series.compare("processes / in-process, plain", plain(apart), plain(inside), 0.75),
        ]


def _direct(pair: int, tokens: int = DIRECT_TOKENS) -> Ask:
    return ask_of(topic(pair), mode="direct", drafter="none", max_new_tokens=tokens, ignore_eos=True)


def _planned_ask(pair: int, drafter: str, max_parallel: int | None = None) -> Ask:
    return ask_of(topic(pair), mode="sot", drafter=drafter, max_parallel=max_parallel)


def topic(number: int) -> str:
    """A question the demo model was trained to plan; spread over its list."""
    lines = (demo() / "topics.txt").read_text(encoding="utf-8").splitlines()
    return lines[number * 127 % len(lines)]


def settings_of(runs: int, wanted: FleetOptions) -> Row:
    """How the figures were taken."""
    return {
        "runs": runs,
        "threads": torch.get_num_threads(),
        "dtype": str(resolve_dtype(wanted.dtype, "cpu")).removeprefix("torch."),
        "quantization": wanted.quantization,
        "kv_cache_dtype": wanted.kv_cache_dtype,
        "draft_dtype": wanted.draft_dtype,
        "draft_quantization": wanted.draft_quantization,
        "torch": torch.__version__,
    }


def page_of(comparisons: Sequence[Comparison]) -> str:
    """One row per comparison, with its aim."""
    headings = ("comparison", "ratio", "quartiles", "aim", "tokens/s", "against", "pairs")
    return pipes(headings, map(_cells, comparisons))


def _cells(one: Comparison) -> list[str]:
    (low, high), (ours, theirs) = one.spread, one.rates
    aim = "" if one.aim is None else f"{one.aim:.2f}"
    spread = f"{low:.2f} .. {high:.2f}"
    return [one.name, f"{one.ratio:.2f}", spread, aim, f"{ours:.0f}", f"{theirs:.0f}", str(len(one.a))]
