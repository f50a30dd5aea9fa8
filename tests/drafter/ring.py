"""The smallest ring: one stage, its verdict, one drafter, turned by hand without links or clocks.

Uses the very engines they use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from specsot.checkpoint.config import read_config
from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.core.frames import Draft, Features, Fork, Frame, Opening, Outcome, PromptChunk, TreeSegment
from specsot.core.tree import Tree, single
from specsot.members import Configuration, Range, TreeShape
from specsot_drafter import growth
from specsot_drafter.core.selection import Candidates
from specsot_drafter.eagle_kv import DraftPages, compute_rows
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.overlap.graph_growth import GraphInput, max_due_rows
from specsot_model.decoder import Decoder
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

PAGES, PAGE_ROWS = 24, 64


class Unguided:
    """See `TreeGraphs`: grows as a graph does, asking nobody between levels, on any device."""

    def __init__(self, head: DraftHead, memory: DraftPages, shape: TreeShape, _: object = None) -> None:
        self.k, self.due = shape.top_k, max_due_rows(shape.top_k, shape.depth + 1)
        self.runs, self._head, self._memory = 0, head, memory

    def fits(self, trees: int) -> bool:
        return True

    def begin(self, seeds: Sequence[GraphInput], levels: int) -> Callable[[], Candidates]:
        self.runs += seeds[0].due.sequence != 0  # that one is made up, before anybody asks
        last = compute_rows(self._head, self._memory, [seed.due for seed in seeds])
        grounds = [seed.room for seed in seeds]
        return partial(growth.TreeGrowth(self._head, self._memory.kv, grounds, self.k).run, last, levels)


def configuration(
    shape: TreeShape, pages: int = PAGES, page_rows: int = PAGE_ROWS, **changes: object
) -> Configuration:
    """One stage and one drafter."""
    return Configuration(1, "drafter", (), pages, page_rows, shape.slots, shape=shape, **changes)  # type: ignore[arg-type]


def load_base(directory: Path) -> Decoder:
    """All layers, fp32, on the CPU."""
    return Decoder.load(directory, Range(0, read_config(directory).layers), torch.float32, "cpu")


def drafts_of(engine: DraftEngine) -> tuple[Draft, ...]:
    """What it says to all that it observed."""
    engine.begin()
    return engine.finish()


@dataclass(slots=True)
class Writer:
    """One decoding sequence as stage 0 would see it."""

    opening: Opening
    committed: int
    draft_round: int = 0
    keep: tuple[int, ...] = ()
    root: int | None = None
    written: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    done: bool = False

    def hear(self, outcome: Outcome, draft_round: int) -> None:
        self.written += outcome.tokens
        self.done = outcome.end is not None
        if outcome.accepted:
            self.accepted.append(len(outcome.accepted) - 1)
        self.committed += len(outcome.accepted)
        self.keep, self.root, self.draft_round = outcome.accepted, outcome.tokens[-1], draft_round + 1


class Ring:
    """Turns steps; `engine` None means plain decoding."""

    def __init__(
        self,
        base: Decoder,
        head: DraftHead,
        engine: DraftEngine | None,
        pages: int = PAGES,
        page_rows: int = PAGE_ROWS,
        ring_rows: int = FEATURE_RING_ROWS,
    ) -> None:
        self._stage = DecoderStage(base, pages, page_rows)
        for layer, weight in head.tap_slices().items():
            self._stage.tap(layer, weight)
        features = FeatureRing(head.width, base.dtype, base.device, ring_rows)
        self._last = Verifier(base.logits, _no_grammar, features)
        self.engine = engine
        self.writers: dict[int, Writer] = {}
        self._drafts: dict[int, Draft] = {}
        self.heard: list[Features] = []
        self.step = 0
        self._rest = 0

    def replace_drafter(self, engine: DraftEngine | None) -> None:
        """The drafter is gone; another one, which knows nothing, is in its place, or nobody."""
        self.engine, self._drafts, self._rest = engine, {}, 0
        self._last.set_drafters(("d",) if engine else ())

    def pause(self, trees: int) -> None:
        """Draft nothing for so many trees."""
        self._rest = trees
        self._drafts = {}

    def open(self, opening: Opening, tokens: list[int], chunk: int = 512) -> Writer:
        """Prefill a sequence, in chunks; `tokens` without a forked part."""
        begin = opening.fork.length if opening.fork else 0
        writer = self.writers[opening.sequence] = Writer(opening, opening.prompt, done=not opening.decodes)
        for start in range(0, len(tokens), chunk):
            part = tuple(tokens[start : start + chunk])
            final = start + chunk >= len(tokens)
            openings = (opening,) if start == 0 else ()
            self._run(
                Frame(1, self.step, openings, (PromptChunk(opening.sequence, begin + start, part, final),))
            )
        return writer

    def turn(self) -> bool:
        """One step of all live writers; False when nobody is left."""
        growths = tuple(self._growth(writer) for writer in self.writers.values() if not writer.done)
        if growths:
            self._run(Frame(1, self.step, (), growths))
        return bool(growths)

    def close(self, sequence: int) -> None:
        del self.writers[sequence]
        self._rest = 0  # or the drafter would hear of it only behind its rest
        self._run(Frame(1, self.step, closings=(sequence,)))

    def _growth(self, writer: Writer) -> TreeSegment:
        assert writer.root is not None
        sequence = writer.opening.sequence
        draft = self._drafts.pop(sequence, None)
        tree = draft.tree if draft and draft.draft_round == writer.draft_round else single(writer.root)
        writer.trees.append(tree)
        return TreeSegment(sequence, writer.draft_round, writer.committed, writer.keep, tree)

    def _run(self, frame: Frame) -> None:
        self.step += 1
        frame = replace(frame, paused=self._rest > 0)
        self._rest = max(self._rest - sum(isinstance(one, TreeSegment) for one in frame.segments), 0)
        verdict = self._last.verify(self._stage.run(frame))
        for outcome in verdict.result.outcomes:
            self.writers[outcome.sequence].hear(outcome, outcome.draft_round)
        messages = next(iter(verdict.features.values()), ())
        self.heard += messages
        if self.engine and messages:
            for features in messages:
                self.engine.observe(features)
            self._drafts |= {draft.sequence: draft for draft in drafts_of(self.engine)}
            self._rest = self.engine.paused_trees


def opening(
    sequence: int, prompt: int, limit: int = 64, fork: tuple[int, int] | None = None, **more: object
) -> Opening:
    """An opening with what tests vary."""
    return Opening(sequence, prompt, Fork(*fork) if fork else None, limit=limit, **more)  # type: ignore[arg-type]


def _no_grammar(_: object) -> None:
    return None
