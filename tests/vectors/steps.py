"""Runs a stage and a drafter step by step on the services' engines; the caller decides what is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specsot.core.frames import (
    FeatureBatch,
    Features,
    Frame,
    Opening,
    PromptChunk,
    Segment,
    TreeSegment,
    rows_of,
)
from specsot.core.tree import Tree, accept, single
from specsot.members import Configuration, TreeShape
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.loader import make_engine
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from tests.drafter.ring import drafts_of

EPOCH, PAGE_ROWS = 1, 64
UNLIMITED = 1 << 20  # tokens a sequence may write: no run here ends by its limit


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a caller accepts of one segment: node numbers, root first, and the token behind them."""

    nodes: tuple[int, ...]
    bonus: int


@dataclass(slots=True)
class _SequenceState:
    """One sequence as stage 0 would see it. tree: what the drafter proposes, or its root alone."""

    committed: int = 0
    draft_round: int = 0
    keep: tuple[int, ...] = ()
    tree: Tree = field(default_factory=lambda: single(0))


class DrivenSteps:
    """Prompts are fed once; then trees, step by step. head None: every tree is its root, plain decoding."""

    def __init__(
        self, base: Decoder, head: DraftHead | None, shape: TreeShape, prompts: Sequence[int], most: int
    ) -> None:
        """prompts: lengths of the texts to come; most: how many tokens any of them may grow by."""
        rows = sum(-(-(length + most + shape.slots) // PAGE_ROWS) for length in prompts)
        self._stage = DecoderStage(base, rows, PAGE_ROWS)
        self._logits, self._engine = base.logits, None
        if head is not None:
            for layer, weight in head.tap_slices().items():
                self._stage.tap(layer, weight)
            slots = shape.slots * len(prompts)
            self._engine = make_engine(
                head, Configuration(EPOCH, "drafter", (), rows, PAGE_ROWS, slots, shape=shape)
            )
        self._stage.capture()
        self._texts: dict[int, _SequenceState] = {}
        self._fed: dict[int, tuple[Segment, Tensor | None]] = {}
        self._openings: tuple[Opening, ...] = ()
        self._step = 0

    @property
    def trees(self) -> dict[int, Tree]:
        """What the drafter proposes now, by sequence."""
        return {sequence: text.tree for sequence, text in self._texts.items()}

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Feed whole prompts side by side; returns the logits [V] behind each."""
        self._openings = tuple(
            Opening(sequence, len(tokens), limit=UNLIMITED) for sequence, tokens in prompts.items()
        )
        self._texts |= {sequence: _SequenceState() for sequence in prompts}
        chunks = [PromptChunk(sequence, 0, tuple(tokens), final=True) for sequence, tokens in prompts.items()]
        return {sequence: rows[-1] for sequence, rows in self._run(chunks).items()}

    def verify(self, trees: Mapping[int, Tree]) -> dict[int, Tensor]:
        """Feed one tree for each of these sequences; returns the logits [nodes, V] at its nodes."""
        self._openings = ()
        return self._run([self._growth(sequence, tree) for sequence, tree in trees.items()])

    def accept(self, verdicts: Mapping[int, Accepted]) -> None:
        """Commit what was fed last, as far as it is accepted; the drafter learns it and drafts anew."""
        feature_batches: list[FeatureBatch] = []
        fused: list[Tensor] = []
        for sequence, verdict in verdicts.items():
            segment, rows = self._fed[sequence]
            feature_batches.append(self._commit(segment, verdict))
            if rows is not None:
                fused.append(rows[list(verdict.nodes)] if isinstance(segment, TreeSegment) else rows)
        if self._engine is not None:
            self._teach(self._engine, feature_batches, fused)

    def _growth(self, sequence: int, tree: Tree) -> TreeSegment:
        text = self._texts[sequence]
        return TreeSegment(sequence, text.draft_round, text.committed, text.keep, tree)

    def _run(self, segments: Sequence[Segment]) -> dict[int, Tensor]:
        self._step += 1
        frame = self._stage.run(Frame(EPOCH, self._step, self._openings, tuple(segments)))
        assert frame.hidden is not None
        logits: Tensor = self._logits(frame.hidden)
        found: dict[int, Tensor] = {}
        self._fed, first = {}, 0
        for segment in segments:
            rows = slice(first, first + rows_of(segment))
            self._fed[segment.sequence] = segment, None if frame.fused is None else frame.fused[rows]
            found[segment.sequence] = logits[rows]
            first = rows.stop
        return found

    def _commit(self, segment: Segment, verdict: Accepted) -> FeatureBatch:
        text = self._texts[segment.sequence]
        start, tokens = text.committed, segment.tokens if isinstance(segment, PromptChunk) else ()
        if isinstance(segment, TreeSegment):
            tokens, text.keep = tuple(segment.tree.tokens[node] for node in verdict.nodes), verdict.nodes
        text.committed, text.draft_round, text.tree = (
            start + len(tokens),
            text.draft_round + 1,
            single(verdict.bonus),
        )
        return FeatureBatch(segment.sequence, start, tokens, verdict.bonus, text.draft_round)

    def _teach(
        self, engine: DraftEngine, feature_batches: Sequence[FeatureBatch], fused: Sequence[Tensor]
    ) -> None:
        rows = torch.cat(tuple(fused))
        engine.observe(
            Features(
                EPOCH,
                self._step,
                self._openings,
                tuple(feature_batches),
                (),
                rows,
                fed=len(rows),
                seconds=0.0,
            )
        )
        for draft in drafts_of(engine):
            self._texts[draft.sequence].tree = draft.tree


def begin(steps: DrivenSteps, prompts: Mapping[int, Sequence[int]]) -> None:
    """Feed prompts, and take the likeliest token behind each."""
    logits = steps.prefill(prompts)
    steps.accept({i: Accepted((0,), likeliest(row.view(1, -1))[0]) for i, row in logits.items()})


def take_step(steps: DrivenSteps, going: Iterable[int]) -> dict[int, tuple[Tree, Accepted]]:
    """One greedy step of these texts: the tree of each, and what of it was accepted."""
    trees = {i: steps.trees[i] for i in going}
    verdicts = {i: judge(trees[i], likeliest(rows)) for i, rows in steps.verify(trees).items()}
    steps.accept(verdicts)
    return {i: (trees[i], verdict) for i, verdict in verdicts.items()}


def judge(tree: Tree, targets: Sequence[int]) -> Accepted:
    """The one rule of acceptance, and the token behind the last accepted node."""
    nodes = accept(tree, targets)
    return Accepted(nodes, targets[nodes[-1]])


def likeliest(rows: Tensor) -> list[int]:
    """The most likely token of each row [rows, V]."""
    return torch.argmax(rows, dim=-1).tolist()
