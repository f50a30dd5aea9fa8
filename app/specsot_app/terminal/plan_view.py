"""The lines of `specsot plan`: what each device holds, how many positions there are, a predicted speed."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.core.info import memory_in_words
from specsot_app.fleet.fitting import FleetPlan, StagePlan

TITLES = ("device", "layers", "weights", "KV", "graphs", "drafter", "together", "free there")


def lines_of(plan: FleetPlan) -> list[str]:
    """At most a screen."""
    rows = [TITLES, *map(_row, plan.stages)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    missing = [f"missing   {memory_in_words(size)} on {place}" for place, size in plan.lacking.items()]
    return [*_models(plan), "", *table, "", *_ring(plan), *missing]


def _models(plan: FleetPlan) -> list[str]:
    others = ", ".join(f"{form} {memory_in_words(size)}" for form, size in plan.forms.items())
    weights = f"{memory_in_words(plan.weights)} in {plan.held}" + (f" ({others})" if others else "")
    text_only = ", text only" if plan.text_only else ""
    lines = [f"model     {plan.model}: {plan.layers} layers{text_only}, {weights}"]
    if plan.draft:
        borrowed = f", and {memory_in_words(plan.draft_borrowed)} copied from the base"
        own = memory_in_words(plan.draft_own) + (borrowed if plan.draft_borrowed else "")
        lines.append(f"drafter   {plan.draft}: {own}")
    return lines


def _row(stage: StagePlan) -> tuple[str, ...]:
    room = "unknown" if stage.room is None else memory_in_words(stage.room)
    parts = (stage.weights, stage.kv, stage.graphs, stage.drafter, stage.need)
    return (stage.place, stage.layers, *(memory_in_words(part) if part else "-" for part in parts), room)


def _ring(plan: FleetPlan) -> list[str]:
    pages = f"{plan.positions // plan.page_rows} pages of {plan.page_rows}"
    return [
        f"KV        {plan.positions:,} positions in {pages}, for all sequences together; "
        f"one may have up to {min(plan.context, plan.positions):,}",
        f"speed     {_speed(plan.stages, plan.tokens_per_second)}",
    ]


def _speed(stages: Sequence[StagePlan], predicted: float | None) -> str:
    read = f"{memory_in_words(sum(stage.read for stage in stages))} of weights that one lap reads"
    if predicted is None:
        return f"not predicted: it takes the memory bandwidth of every device ({read})"
    speeds = ", ".join(dict.fromkeys(f"{stage.bandwidth / 1e9:,.0f}" for stage in stages if stage.bandwidth))
    return (
        f"{predicted:.1f} tokens/s predicted, not measured: {read} / {speeds} GB/s; "
        "one sequence, no drafts, no network"
    )
