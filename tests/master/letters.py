"""What the conductor's tests ask about: a plan of three letters, a direct answer, a long count."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.core.frames import Open, Opening
from specsot.events import Finished
from specsot.params import Ask, Limits
from specsot_master.engine import RingState
from tests.master.stage import Stage, repeat

PLAN = "[PLAN]\n1.<40><None>[-]Alpha\n2.<20><None>[-]Beta 你好\n3.<30><None>[1]Gamma 🎉\n[END]"
SAYS = {
    "Write the plan.": PLAN,
    "Write point 1": "Alpha is the first letter.",
    "Write point 2": "Beta 正文在这里。🎉",
    "Write point 3": "Gamma follows alpha.\n",
    "Count": repeat("word", 300),
    "Continue where": repeat("word", 300),
    "What is": "It is naïve 你好.",
}
ANSWER = (
    "## 1. Alpha\nAlpha is the first letter.\n\n## 2. Beta 你好\nBeta 正文在这里。🎉\n\n"
    "## 3. Gamma 🎉\nGamma follows alpha."
)
SOT = Ask(prompt="Tell me about letters.", mode="sot", seed=5)
DIRECT = Ask(prompt="What is it?", mode="direct", seed=5)
COUNT = Ask(prompt="Count.", mode="direct", seed=5, limits=Limits(max_new_tokens=400))


TIGHT = RingState(epoch=1, pages=40, page_rows=64, slots=8, max_positions=2048)
SMALL = Limits(max_new_tokens=300, max_skeleton_tokens=200)


def openings(stage: Stage) -> list[Opening]:
    return [order.opening for order in stage.ring.orders if isinstance(order, Open)]


def finished(events: Sequence[object]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last
