"""The whole ring in one thread: sequencer, stage, verdict and drafter, called one after the other.

Refuses to know text, transports and clocks. Uses the very engines the services use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.core.frames import Drafts, Frame, Open, Result
from specsot.core.pages import PageTable
from specsot.core.tree import Tree
from specsot.errors import ModelError
from specsot.members import Configuration, TreeShape
from specsot_app.eagle.models import TargetAndDraft
from specsot_drafter.engine import DraftEngine
from specsot_drafter.single import make_engine
from specsot_worker.features import FeatureStore
from specsot_worker.patience import DraftTimeout
from specsot_worker.sequencer import FrameBudget, Sequencer
from specsot_worker.stage import DecoderStage
from specsot_worker.verdict import VerifiedFrame, Verifier

EPOCH, PAGE_ROWS = 1, 256
ROWS = 512  # of a frame at least: prompts are fed in stretches of so many


@dataclass(frozen=True, slots=True)
class Lap:
    """One forward of the target: what was fed, and what came of it."""

    frame: Frame
    result: Result


class SmallRing:
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
        self._stage = DecoderStage(models.target, pages, PAGE_ROWS)
        self._judge = Verifier(models.target.logits, _no_grammar, _store_for(models, pages))
        table, budget = PageTable(pages, PAGE_ROWS), FrameBudget(rows, flight=1, slots=slots)
        self._sequencer = Sequencer(EPOCH, budget, table, DraftTimeout(0.0, models.draft is not None))
        self._engine: DraftEngine | None = None
        self.trees: dict[int, Tree] = {}
        if models.draft is not None:
            for layer, weight in models.draft.tap_slices().items():
                self._stage.tap(layer, weight)
            configuration = Configuration(EPOCH, "drafter", (), pages, PAGE_ROWS, slots, rows, shape=shape)
            self._engine = make_engine(models.draft, configuration)
        self._stage.capture()
        for order in orders:
            self._sequencer.apply_order(order)

    def turn(self) -> Lap:
        """Feed everything that is ready in one forward; then draft below whatever was written.

        Raises ModelError when nothing can be fed: then no sequence is left.
        """
        frame = self._sequencer.compose(0.0)
        if frame is None:
            raise ModelError("no sequence is left that could be fed")
        verdict = self._judge.verify(self._stage.run(frame))
        self._sequencer.apply_result(verdict.result, 0.0)
        if self._engine is not None:
            self._sequencer.add_drafts(self._draft(self._engine, verdict))
        return Lap(frame, verdict.result)

    def _draft(self, engine: DraftEngine, verdict: VerifiedFrame) -> Drafts:
        for features in verdict.features:
            engine.observe(features)
        drafts = engine.draft()
        self.trees = {draft.sequence: draft.tree for draft in drafts}
        return Drafts(EPOCH, drafts, engine.rest)


def _store_for(models: TargetAndDraft, pages: int) -> FeatureStore | None:
    target, draft = models.target, models.draft
    return FeatureStore(pages, PAGE_ROWS, draft.width, target.dtype, target.device) if draft else None


def _no_grammar(_: object) -> None:
    """Nothing here is constrained."""
