"""A ring without weights: KV holds tokens, and the target is a hash of what a row can see.

If a page, a move, a mask or a position is wrong, a row sees other tokens and the hash tells.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field

from specsot.core.frames import Draft, Drafts, Frame, Opening, Outcome, PromptChunk, Result, tokens_of
from specsot.core.pages import PageTable
from specsot.core.tree import Tree
from specsot.core.tree_parts import cut_frame
from specsot_model.core.kv_plan import KvPlan, plan_frame
from specsot_worker.core.accept import DecodeState, accept_prompt, accept_tree
from specsot_worker.core.sequencer import Sequencer

VOCABULARY = 7


def target_of(context: list[int]) -> int:
    """The mock model: next token from everything before it."""
    return zlib.crc32(bytes(context)) % VOCABULARY


def write_plainly(prompt: list[int], count: int) -> list[int]:
    """Plain decoding by the mock model."""
    text = list(prompt)
    for _ in range(count):
        text.append(target_of(text))
    return text[len(prompt) :]


@dataclass
class MockStage:
    """A stage's table and a KV of tokens; `seen` lists each row's visible context."""

    table: PageTable
    kv: dict[int, int] = field(default_factory=dict)

    def run(self, frame: Frame) -> list[list[int]]:
        arrangement = plan_frame(self.table, frame)
        size = self.table.page_rows
        for copy in arrangement.copies:
            for row in range(copy.rows):
                self.kv[copy.target * size + row] = self.kv[copy.source * size + row]
        moved = [self.kv[source] for source, _ in arrangement.moves]
        for (_, target), token in zip(arrangement.moves, moved):
            self.kv[target] = token
        tokens = [token for segment in frame.segments for token in tokens_of(segment)]
        self.kv.update(zip(arrangement.slots, tokens))
        return self._contexts(arrangement)

    def _contexts(self, arrangement: KvPlan) -> list[list[int]]:
        seen = []
        for place in arrangement.spans:
            size = self.table.page_rows
            slots = [page * size + row for page in place.pages for row in range(size)]
            before = [self.kv[slot] for slot in slots[: place.base]]
            for row in range(place.rows):
                bits = place.visible[row] if place.visible else (1 << (row + 1)) - 1
                tail = (slots[place.base + i] for i in range(place.tail) if bits >> i & 1)
                seen.append([*before, *(self.kv[slot] for slot in tail)])
        return seen


class MockRing:
    """Stages in a row with frames in flight, a judge, and a drafter of any quality."""

    def __init__(self, sequencer: Sequencer, stages: list[MockStage], rng: random.Random, skill: float):
        self.sequencer, self.stages, self.rng, self.skill = sequencer, stages, rng, skill
        self.written: dict[int, DecodeState] = {}
        self.openings: dict[int, Opening] = {}
        self.log: dict[int, list[int]] = {}
        self.ends: dict[int, object] = {}
        self.context: dict[int, list[int]] = {}
        self.flying: deque[Frame] = deque()
        self.late: list[Drafts] = []
        self.frames: list[Frame] = []
        self.now = 0.0
        self.cut = 0  # frames that travelled in parts

    def turn(self) -> bool:
        """One step of the world; False when nothing can move any more."""
        frame = self.sequencer.compose(self.now)
        if frame is not None:
            self.frames.append(frame)
            self.flying.append(frame)
        if self.flying and (frame is None or self.rng.random() < 0.5):
            self._finish(self.flying.popleft())
            return True
        if frame is None and self.late:
            self.sequencer.add_drafts(self.late.pop(self.rng.randrange(len(self.late))))
            return True
        if frame is None and (deadline := self.sequencer.deadline()) is not None:
            self.now = max(self.now, deadline)
            return True
        return frame is not None

    def _finish(self, frame: Frame) -> None:
        parts = cut_frame(frame)
        self.cut += len(parts) > 1
        seen = [[row for part in parts for row in stage.run(part)] for stage in self.stages]
        assert all(one == seen[0] for one in seen)
        for opening in frame.openings:
            if opening.decodes:
                self.written[opening.sequence] = DecodeState(opening)
        outcomes = tuple(self._judge(frame, seen[0]))
        for sequence in frame.closings:
            self.written.pop(sequence, None)
        overtaken = self.rng.random() < 0.3  # the result, by the drafts that build on it
        for said in ("drafts", "result") if overtaken else ("result", "drafts"):
            if said == "result":
                self.sequencer.apply_result(Result(1, frame.number, outcomes), self.now)
            else:
                self._draft([outcome for outcome in outcomes if not outcome.end])

    def _judge(self, frame: Frame, seen: list[list[int]]) -> list[Outcome]:
        outcomes, first = [], 0
        for segment in frame.segments:
            rows = seen[first : first + len(tokens_of(segment))]
            first += len(rows)
            written = self.written.get(segment.sequence)
            if written is None or (isinstance(segment, PromptChunk) and not segment.final):
                continue
            if isinstance(segment, PromptChunk):
                outcome = accept_prompt(written, target_of(rows[-1]))
            else:
                targets: list[int | None] = [target_of(row) for row in rows]
                outcome = accept_tree(written, segment.draft_round, segment.tree, targets)
            self._record(outcome, rows)
            outcomes.append(outcome)
        return outcomes

    def _record(self, outcome: Outcome, rows: list[list[int]]) -> None:
        self.log.setdefault(outcome.sequence, []).extend(outcome.tokens)
        node = outcome.accepted[-1] if outcome.accepted else -1
        self.context[outcome.sequence] = [*rows[node], outcome.tokens[-1]]
        if outcome.end:
            self.ends[outcome.sequence] = outcome.end
            self.written.pop(outcome.sequence)

    def _draft(self, outcomes: list[Outcome]) -> None:
        drafts = [
            Draft(o.sequence, o.draft_round + 1, self._tree(self.context[o.sequence])) for o in outcomes
        ]
        message = Drafts(1, tuple(drafts))
        if self.rng.random() < 0.2:
            self.late.append(message)
        elif drafts and self.rng.random() < 0.9:
            self.sequencer.add_drafts(message)

    def _tree(self, context: list[int]) -> Tree:
        """A random tree; each child is the true next token with probability `skill`."""
        tokens, parents, contexts = [context[-1]], [0], [context]
        for node in range(1, self.rng.randrange(1, 9)):
            parent = self.rng.randrange(node)
            true = target_of(contexts[parent])
            token = true if self.rng.random() < self.skill else self.rng.randrange(VOCABULARY)
            tokens.append(token)
            parents.append(parent)
            contexts.append([*contexts[parent], token])
        return Tree(tuple(tokens), tuple(parents))
