"""The whole ring in one thread: sequencer, stage, verdict and drafter, called one after the other.

Refuses to know text, transports and clocks. Uses the very engines the services use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.errors import ModelError
from specsot.frames import Drafts, Frame, Open, Result
from specsot.members import Configuration, TreeShape
from specsot.pages import PageTable
from specsot.tree import Tree
from specsot_app.eagle.models import TargetAndDraft
from specsot_drafter.engine import DraftEngine
from specsot_drafter.single import engine_of
from specsot_worker.features import FeatureStore
from specsot_worker.patience import Patience
from specsot_worker.sequencer import Budget, Sequencer
from specsot_worker.stage import Stage
from specsot_worker.verdict import LastStage, Verdict

EPOCH, PAGE_ROWS = 1, 256
ROWS = 512  # of a frame at least: prompts are fed in stretches of so many


@dataclass(frozen=True, slots=True)
class Lap:
    """One forward of the target: what was fed, and what came of it."""

    frame: Frame
    result: Result


class LapLoop:
    """A batch of sequences, all opened at once; each may be fed up to its lease.

    trees: what the drafter proposed last, by sequence.
    """

    def __init__(
        self, models: TargetAndDraft, shape: TreeShape, orders: Sequence[Open], rows: int = ROWS
    ) -> None:
        """rows: of a frame at least; the trees of all sequences always fit into one."""
        slots = shape.slots if models.draft else 1
        pages = sum(-(-(order.lease + slots) // PAGE_ROWS) for order in orders)
        rows = max(rows, len(orders) * shape.nodes)
        self._stage = Stage(models.target, pages, PAGE_ROWS)
        self._judge = LastStage(models.target.logits, _no_grammar, _store_for(models, pages))
        table, budget = PageTable(pages, PAGE_ROWS), Budget(rows, flight=1, slots=slots)
        self._sequencer = Sequencer(EPOCH, budget, table, Patience(0.0, models.draft is not None))
        self._engine: DraftEngine | None = None
        self.trees: dict[int, Tree] = {}
        if models.draft is not None:
            for layer, weight in models.draft.tap_slices().items():
                self._stage.tap(layer, weight)
            configuration = Configuration(EPOCH, "drafter", (), pages, PAGE_ROWS, slots, rows, shape=shape)
            self._engine = engine_of(models.draft, configuration)
        self._stage.prepare()
        for order in orders:
            self._sequencer.obey(order)

    def turn(self) -> Lap:
        """Feed everything that is ready in one forward; then draft below whatever was written.

        Raises ModelError when nothing can be fed: then no sequence is left.
        """
        frame = self._sequencer.compose(0.0)
        if frame is None:
            raise ModelError("no sequence is left that could be fed")
        verdict = self._judge.judge(self._stage.run(frame))
        self._sequencer.learn(verdict.result, 0.0)
        if self._engine is not None:
            self._sequencer.offer(self._draft(self._engine, verdict))
        return Lap(frame, verdict.result)

    def _draft(self, engine: DraftEngine, verdict: Verdict) -> Drafts:
        for features in verdict.features:
            engine.learn(features)
        drafts = engine.draft()
        self.trees = {draft.sequence: draft.tree for draft in drafts}
        return Drafts(EPOCH, drafts, engine.rest)


def _store_for(models: TargetAndDraft, pages: int) -> FeatureStore | None:
    target, draft = models.target, models.draft
    return FeatureStore(pages, PAGE_ROWS, draft.width, target.dtype, target.device) if draft else None


def _no_grammar(_: object) -> None:
    """Nothing here is constrained."""
