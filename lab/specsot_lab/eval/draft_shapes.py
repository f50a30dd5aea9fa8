"""`specsot eval --draft-shapes`: tokens a lap of direct answers, by shapes of drafts, greedy and sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TextIO

from specsot.drafting import DraftOptions
from specsot.errors import InvalidRequest
from specsot_app.bench.core.tables import Column, figure, markdown, text
from specsot_app.bench.results import named, write_results
from specsot_app.fleet.opening import Opener
from specsot_lab.eval.core.aspect_table import interval_of
from specsot_lab.eval.records import Record
from specsot_lab.eval.running import Asked, Run, answer_all, complaints

Row = dict[str, object]
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A chain of `nodes` drafts, or a tree of so many nodes, its root left out."""

    kind: str
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.nodes}"

    @property
    def drafting(self) -> DraftOptions:
        """The whole of it in every lap, whether it pays or not. Of a tree of 8 levels, with 10 children of a
        node as EAGLE-2 has them, the likeliest nodes are kept.
        """
        if self.kind == "chain":
            return DraftOptions(mode="linear", tokens=self.nodes, nodes=self.nodes, tuner="fixed")
        return DraftOptions(mode="tree", tokens=8, breadth=10, nodes=self.nodes, tuner="fixed")


def shapes_of(told: str) -> list[DraftShape]:
    """ "chain:5,tree:24". Raises InvalidRequest."""
    found: list[DraftShape] = []
    for one in told.split(","):
        kind, _, nodes = one.strip().partition(":")
        if kind not in ("chain", "tree") or not nodes.isdecimal() or not int(nodes):
            raise InvalidRequest(f"shapes are such as chain:5,tree:24, got {one!r}", field="draft_shapes")
        found.append(DraftShape(kind, int(nodes)))
    return found


async def evaluate(
    run: Run,
    shapes: Sequence[DraftShape],
    out: TextIO,
    err: TextIO,
    opener: Opener,
) -> int:
    """First turns alone. A fleet for each shape; a table, and shapes.json."""
    if run.wanted.master is not None:
        raise InvalidRequest(
            "a fleet is opened for each shape, so there is no --master", field="draft_shapes"
        )
    run.check()
    prompts = [replace(one, turns=one.turns[:1]) for one in run.prompts]
    rows: list[Row] = []
    found: list[Record] = []
    for shape in shapes:
        asked = [
            Asked(prompt, "direct", f"{shape.name} at {heat:g}", {"temperature": heat, "seed": 1})
            for heat in TEMPERATURES
            for prompt in prompts
        ]
        records = await answer_all(run, asked, err, opener, replace(run.wanted, drafting=shape.drafting))
        found += records
        for place, heat in enumerate(TEMPERATURES):
            mine = records[place * len(prompts) : (place + 1) * len(prompts)]
            rows += [row | {"drafts": shape.name, "temperature": heat} for row in rows_of(mine)]
    out.write(f"{markdown(COLUMNS, rows)}\n")
    out.writelines(f"{line}\n" for line in complaints(found))
    settings = run.folder.settings()
    write_results(
        run.folder.path / "shapes.json", "shapes", settings, named(rows, "task", "drafts", "temperature")
    )
    return 0 if rows else 1


def rows_of(records: Sequence[Record]) -> list[Row]:
    """One for each task. Tokens a lap over all laps, and their bootstrap interval over questions."""
    answered = [record for record in records if record["turns"] and record["turns"][0]["laps"]]
    rows: list[Row] = []
    for task in dict.fromkeys(record["task"] for record in answered):
        turns = [record["turns"][0] for record in answered if record["task"] == task]
        means, laps = [turn["per_lap"] for turn in turns], [turn["laps"] for turn in turns]
        per_lap = math.fsum(mean * count for mean, count in zip(means, laps)) / sum(laps)
        rows.append({
            "task": task,
            "questions": len(turns),
            "laps": sum(laps),
            "per_lap": per_lap,
            "interval": interval_of(means, laps),
            "tokens": fmean(turn["tokens"] for turn in turns),
        })  # fmt: skip
    return rows


COLUMNS = (
    text("set", "task"),
    text("drafts", "drafts"),
    figure("T", "temperature", 1),
    figure("n", "questions", 0),
    figure("laps", "laps", 0),
    figure("tokens a lap", "per_lap"),
    Column("95 %", lambda row: "{:.2f} .. {:.2f}".format(*row["interval"])),
)
