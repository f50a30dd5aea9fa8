"""From questions to rows: the base's own plans, points and direct answers, in the product's own prompts.

Refuses to know heads and training. The plan turn is written freely, not held to the grammar; what does not
read as a plan has no points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specsot.errors import PlanError
from specsot.params import Message
from specsot.skeleton import PlanRules, Point, read_plan
from specsot_lab.train.rows import Row, row_of
from specsot_lab.train.settings import Asking
from specsot_lab.train.writing import Writer
from specsot_master.prompts import Conversation, Prompts
from specsot_master.text import Text

Watch = Callable[[str, int, int], Callable[[int], object]]  # (what, done, total) -> hears of progress


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt on its way to an answer, of question number `group`."""

    group: int
    prompt: tuple[int, ...]


def answer_all(
    questions: Sequence[str], prompts: Prompts, text: Text, writer: Writer, asking: Asking, watch: Watch
) -> list[Row]:
    """Rows of everything the base writes to these questions; the answers are what is learned."""
    rules = PlanRules(plan_tokens=asking.plan_tokens)
    turns = [prompts.plan((Message("user", question),), rules) for question in questions]
    plans = [_Asked(group, turn.skeleton.tokens) for group, turn in enumerate(turns)]
    written = _write(plans, writer, asking.plan_tokens, watch, "plans")
    rows = _rows(plans, written)
    points = [
        _Asked(asked.group, prompt)
        for asked, plan in zip(plans, written)
        for prompt in _branches(turns[asked.group], text.decode(plan))
    ]
    rows += _rows(points, _write(points, writer, asking.answer_tokens, watch, "points"))
    direct = [
        _Asked(group, prompts.chat((Message("user", questions[group]),)))
        for group in _spread(len(questions), asking.direct)
    ]
    return rows + _rows(direct, _write(direct, writer, asking.answer_tokens, watch, "answers"))


def _write(asked: Sequence[_Asked], writer: Writer, limit: int, watch: Watch, what: str) -> list[list[int]]:
    return writer.write([one.prompt for one in asked], limit, watch(what, 0, len(asked)))


def _rows(asked: Sequence[_Asked], written: Sequence[Sequence[int]]) -> list[Row]:
    return [
        row_of(((one.prompt, False), (text, True)), one.group) for one, text in zip(asked, written) if text
    ]


def _branches(turn: Conversation, plan: str) -> list[tuple[int, ...]]:
    """The prompt of every point that stands alone; one that builds on others would need their texts."""
    points = _points(plan)
    return [turn.branch(point, points, [], point.length).tokens for point in points if not point.needs]


def _points(plan: str) -> tuple[Point, ...]:
    try:
        return read_plan(plan) or ()
    except PlanError:
        return ()


def _spread(count: int, share: float) -> list[int]:
    """So large a share of 0 .. count - 1, evenly."""
    wanted = round(count * share)
    return sorted({place * count // wanted for place in range(wanted)}) if wanted else []
