"""`specsot bench ablation`: what each optimisation brings by itself, on one page.

Each row is one setting on and off, all else equal, in paired runs (AB BA AB ...) of the same questions.
Where the text must not change, the column `same` counts the pairs whose texts agree.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specsot.errors import SpecsotError
from specsot.params import Ask
from specsot_app.bench.core.pairing import Comparison, Run, Sample, as_json, compare
from specsot_app.bench.core.tables import pipes
from specsot_app.bench.plots import drawn, ratios
from specsot_app.bench.results import Row, write_results
from specsot_app.core.ask import ask_of
from specsot_app.fleet.opening import Fleet
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_lab.bench.asking import answer, opened

Settings = Mapping[str, Any]

CHAIN = 5  # K of the chain that trees are compared with
SIGHT = 256  # tokens that the window's row attends to, sinks included
PLANNED: Settings = {"mode": "sot"}
PLAIN: Settings = {"drafter": "none"}
CHAINED: Settings = {"draft_mode": "linear", "draft_tokens": CHAIN, "tuner": "fixed"}


@dataclass(frozen=True, slots=True)
class Switch:
    """One optimisation. on, off: settings of the fleet; asked_on, asked_off: of every request.

    exact: both sides must write the same text in fp32. head: it needs an EAGLE head.
    """

    name: str
    on: Settings = field(default_factory=dict[str, Any])
    off: Settings = field(default_factory=dict[str, Any])
    asked_on: Settings = field(default_factory=dict[str, Any])
    asked_off: Settings = field(default_factory=dict[str, Any])
    exact: bool = True
    head: bool = False


SWITCHES = (
    Switch("drafting", off=PLAIN, head=True),
    Switch("tree", {"tree": "fixed"}, CHAINED, head=True),
    Switch("adaptive", off={"tree": "fixed"}, head=True),
    Switch("blend", off={"blend": False}, head=True),
    Switch("ngram", {"drafter": "ngram"}, PLAIN),
    Switch("plan", PLAIN, PLAIN, asked_on=PLANNED, exact=False),
    Switch("parallel", PLAIN, PLAIN, PLANNED, {**PLANNED, "max_parallel": 1}, exact=False),
    Switch("batched", PLAIN, {**PLAIN, "layout": "packed"}, PLANNED, PLANNED),
    Switch("window", PLAIN, PLAIN, {"sinks": 4, "recent": SIGHT - 4}, exact=False),
    Switch("int8", {**PLAIN, "quantization": "int8"}, PLAIN, exact=False),
    Switch("int8-kv", {**PLAIN, "kv_cache_dtype": "int8"}, PLAIN, exact=False),
)
MEANING = {
    "drafting": "EAGLE trees against plain decoding",
    "tree": f"whole EAGLE trees against chains of {CHAIN}",
    "adaptive": "trees as large as pays, against whole trees",
    "blend": "n-grams of the text join the trees",
    "ngram": "n-grams of the text alone, against plain decoding",
    "plan": "a plan and its branches against a direct answer",
    "parallel": "branches side by side against one after the other",
    "batched": "branches as a batch against packed rows",
    "window": f"4 sinks and {SIGHT - 4} recent tokens against all",
    "int8": "weights of 8 bits",
    "int8-kv": "KV rows of 8 bits",
}


@dataclass(frozen=True, slots=True)
class AblationOptions:
    """samples: pairs of each row. tokens: of every answer. only: names of SWITCHES."""

    wanted: FleetOptions
    questions: Sequence[str]
    samples: int = 5
    tokens: int = 128
    only: Sequence[str] = ()
    has_head: bool = True

    @property
    def switches(self) -> list[Switch]:
        return [one for one in SWITCHES if not self.only or one.name in self.only]

    def ask(self, pair: int, asked: Settings) -> Ask:
        """Greedy, of so many tokens; a plan's branches end by themselves."""
        more = {"mode": "direct", "ignore_eos": True, **asked}
        more["ignore_eos"] = more["mode"] == "direct"
        question = self.questions[pair % len(self.questions)]
        return ask_of(question, temperature=0.0, max_new_tokens=self.tokens, seed=pair, **more)


def measure(options: AblationOptions, output: Path | None) -> int:
    """A table; JSON, Markdown and a plot beside it where asked to."""
    quiet_logs()
    rows = run_until_signal(_measure(options))
    page = page_of(rows)
    print(page)
    if output is not None:
        wanted = options.wanted
        settings = {"model": wanted.model or "demo", "device": wanted.device, "dtype": wanted.dtype}
        settings |= {"samples": options.samples, "tokens": options.tokens}
        write_results(output, "ablation", settings, rows)
        output.with_suffix(".md").write_text(page, encoding="utf-8")
        drawn(lambda: ratios(rows, "Each optimisation by itself", output.with_suffix(".png")))
    return 0


async def _measure(options: AblationOptions) -> list[Row]:
    rows = list[Row]()
    with counting_bar(sys.stderr, "optimisations", len(options.switches)) as count:
        for switch in options.switches:
            rows.append(await measured(switch, options))
            count()
    return rows


async def measured(switch: Switch, options: AblationOptions) -> Row:
    """One row; why not, where it cannot be measured."""
    named: Row = {"name": switch.name, "what": MEANING[switch.name], "exact": switch.exact}
    if switch.head and not options.has_head:
        return {**named, "skipped": "needs --draft-model, an EAGLE head"}
    try:
        comparison, same = await _compared(switch, options)
    except SpecsotError as error:
        return {**named, "skipped": str(error)}
    (row,) = as_json([comparison])
    return {**named, **row, "same": same}


async def _compared(switch: Switch, options: AblationOptions) -> tuple[Comparison, int]:
    """The pairs, and how many of them wrote the same text."""
    texts: dict[tuple[int, bool], str] = {}
    on, off = (replace(options.wanted, **dict(settings)) for settings in (switch.on, switch.off))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(opened(on))
        other = first if on == off else await stack.enter_async_context(opened(off))

        def side(fleet: Fleet, asked: Settings, is_on: bool) -> Run:
            async def write(pair: int) -> Sample:
                found = await answer(fleet, options.ask(pair, asked))
                texts[pair, is_on] = found.finished.text
                return found.whole()

            return write

        ours, theirs = side(first, switch.asked_on, True), side(other, switch.asked_off, False)
        await ours(0)  # nothing cold is counted
        await theirs(0)
        comparison = await compare(switch.name, ours, theirs, options.samples)
    return comparison, sum(texts[pair, True] == texts[pair, False] for pair in range(options.samples))


def page_of(rows: Sequence[Row]) -> str:
    """One row an optimisation."""
    headings = ("optimisation", "what", "on / off", "quartiles", "tok/s on", "off", "same")
    return pipes(headings, [_cells(row) for row in rows], left=2)


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "skipped" in row:
        return [row["name"], row["what"], f"not measured: {row['skipped']}", "", "", "", ""]
    (low, high), (on, off) = row["quartiles"], row["tokens_per_second"]
    same = f"{row['same']}/{row['pairs']}" if row["exact"] else "-"
    figures = [f"{row['ratio']:.2f}", f"{low:.2f} .. {high:.2f}", f"{on:.1f}", f"{off:.1f}"]
    return [row["name"], row["what"], *figures, same]
