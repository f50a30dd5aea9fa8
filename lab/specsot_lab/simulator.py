"""A ring without weights: a worker and a drafter whose text is a pure function of the tokens before.

A stage's KV rows are checksums of the text before them: a row that sees a wrong page, move or mask has
another checksum, so the answer differs, or the next stage refuses the frame."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.core.cost_curve import CostCurve
from specsot.core.frames import Frame, Opening, Segment, TreeSegment, tokens_of
from specsot.core.pages import PageTable
from specsot.core.vocabulary import read_vocabulary
from specsot.errors import WireError
from specsot.grammar import Grammar, grammar_of
from specsot.members import Configuration, Curve, Head, Range, Registration, TreeShape
from specsot.transport.links import Dialer
from specsot_drafter.core.control import make_budget
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.drafter import Drafter
from specsot_drafter.engine import DraftEngine
from specsot_drafter.proposers import Proposer
from specsot_kernels.segments import RowSpan
from specsot_master.text import Text
from specsot_model.core.kv_plan import KvPlan, plan_frame
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.observer import WorkerObserver
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker

# The state of an empty text.
EMPTY_STATE = 0  # the state of an empty text


def next_state(state: int, token: int) -> int:
    """Return the state (32 bits) after one more token. It depends on every token before. state: after the
    text so far.
    """
    return zlib.crc32(token.to_bytes(4, "little"), state)


def state_of(tokens: Iterable[int], state: int = EMPTY_STATE) -> int:
    """Return the state after these tokens. state: after the text before them; EMPTY_STATE for none."""
    for token in tokens:
        state = next_state(state, token)
    return state


@dataclass(frozen=True, slots=True)
class FakeLM:
    """A language model whose next token is a function of the state after the text.

    alphabet: the tokens it writes with. A vocabulary's first ones are seldom text.
    """

    alphabet: Sequence[int] = range(300, 1324)

    def next(self, state: int) -> int:
        """Return the token that follows a text with this state."""
        return self.alphabet[state % len(self.alphabet)]

    def write(self, tokens: Iterable[int], num_tokens: int) -> list[int]:
        """Return the `num_tokens` tokens that decoding without speculation writes after `tokens`."""
        state = state_of(tokens)
        written = list[int]()
        for _ in range(num_tokens):
            written.append(self.next(state))
            state = next_state(state, written[-1])
        return written

    def knows(self, state: int, skill: float) -> bool:
        """Return whether a drafter of this skill (0..1) guesses right after a text with this state; always
        the same answer.
        """
        return next_state(state, 0) < skill * (1 << 32)


class OracleDrafter(Proposer):
    """A proposer that knows the language model, as well as its skill allows. Its trees are chains."""

    def __init__(
        self,
        language_model: FakeLM,
        skill: float,
        max_depth: int,
        spend_time: Callable[[int], None],
        num_pages: int = 0,
    ) -> None:
        """Prepare to draft.

        language_model: whose tokens it guesses. skill: probability (0..1) that a draft is right. max_depth:
            levels at most. spend_time: called with the rows of every level that is grown. num_pages: free
            pages that it reports, since it needs none.
        """
        self.widths = (1,) * (max_depth - 1)
        self._pages = num_pages
        self._voice = language_model
        self._skill = skill
        self._spend = spend_time
        self._known: dict[int, tuple[int, int]] = {}  # tokens read so far, and the state behind them

    @property
    def free_pages(self) -> int:
        """Return the number of free pages that the drafter reports, which never changes."""
        return self._pages

    def follows(self, sequence: int) -> bool:
        """Return whether this sequence is open. sequence: its id."""
        return sequence in self._known

    def open(self, sequence: DraftSequence) -> None:
        """Begin to follow a sequence, of which nothing has been read."""
        self._known[sequence.id] = 0, 0

    def close(self, sequence: int) -> None:
        """Forget a sequence; an unknown id has no effect."""
        self._known.pop(sequence, None)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return a chain for each sequence, all equally long, as far as another level deserves its time.

        sequences: those that need a tree. levels: maximum depth. keep_growing: is asked after each level
            whether to draft another one; None: always.
        """
        depths = np.arange(1, levels + 1)
        scores = np.tile(depths * np.log(self._skill or 1e-9), (len(sequences), 1))
        for depth in range(1, levels + 1):
            self._spend(len(sequences))
            if depth < levels and keep_growing and not keep_growing(scores[:, depth - 1 : depth], depth):
                levels = depth
                break
        tokens = np.array([self._chain(sequence, levels) for sequence in sequences], np.int64)
        parents = np.tile(depths[:levels] - 1, (len(sequences), 1))
        return Candidates(tokens, scores[:, :levels], parents, depths[:levels])

    def _chain(self, sequence: DraftSequence, levels: int) -> list[int]:
        """Return `levels` drafts for a sequence; token 0 stands where the drafter guesses wrong."""
        state = self._read(sequence)
        chain = list[int]()
        for _ in range(levels):
            next_token = self._voice.next(state)
            chain.append(next_token if self._voice.knows(state, self._skill) else 0)
            state = next_state(state, next_token)
        return chain

    def _read(self, sequence: DraftSequence) -> int:
        """Return the state after the sequence's tokens; only tokens that were not read before are read."""
        num_read, state = self._known[sequence.id]
        state = state_of(sequence.tokens[num_read:], state)
        self._known[sequence.id] = len(sequence.tokens), state
        return state


Sleep = Callable[[float], object]
# Seconds by rows: nearly nothing, but not nothing, since costs are divided.
FREE: Curve = ((1, 1e-5), (64, 1e-5))  # next to nothing, but not nothing: costs are divided


@dataclass(frozen=True, slots=True)
class Simulator:
    """A ring without weights.

    model: whose tokenizer and number of layers. kv_memory: bytes of each member; a row takes 256 a layer.
    layer: seconds per rows of one layer; growth: of one level of all trees. sleep: how they are spent.
    plan: what it writes as a skeleton; empty: the grammar's first choices. See `plan_of`.
    skill: how often a drafted token is right behind right ones; its scores say the same.
    width, fused: of hidden and fused rows, fp32; taps as those of a head of this model.
    """

    model: Path
    voice: FakeLM = field(default_factory=FakeLM)
    plan: tuple[int, ...] = ()
    layer: Curve = FREE
    growth: Curve = FREE
    sleep: Sleep = time.sleep
    skill: float = 0.8
    shape: TreeShape = field(default_factory=TreeShape)
    width: int = 3
    fused: int = 3
    kv_memory: int = 1 << 28

    def worker(
        self,
        name: str,
        address: str,
        dialer: Dialer,
        compute: Executor,
        observer: WorkerObserver | None = None,
    ) -> Worker:
        """Return a worker of this ring.

        name: the member's name. address: where it listens. dialer: connects it to others. compute: its
            thread. observer: is told of its frames; None: nothing is observed.
        """
        return Worker(MockWorker(self, name, address), dialer, compute, observer=observer)

    def drafter(self, name: str, address: str, dialer: Dialer, compute: Executor) -> Drafter:
        """Return a drafter of this ring. name: the member's name. address: where it listens. dialer: connects
        it to others. compute: its thread.
        """
        return Drafter(MockDrafter(self, name, address), dialer, compute)


def plan_of(model: Path, points: int, length: int) -> tuple[int, ...]:
    """Return the token ids of a skeleton, as the model's tokenizer spells it.

    model: directory with the tokenizer. points: number of points. length: tokens that each point asks for.
    """
    lines = [f"{n}.<{length}><None>[-]Point {n}\n" for n in range(1, points + 1)]
    return Text(model).encode_bare("[PLAN]\n" + "".join(lines) + "[END]")


class MockWorker:
    """Makes stages without weights, as `specsot_worker.stage_provider` describes. mock: the simulator. name,
    address: of the member.
    """

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        self._mock = mock
        self.name = name
        self._address = address
        self.loaded = self.fetched = 0
        self.vocabulary = read_config(mock.model).vocab

    def registration(self) -> Registration:
        """Return what the worker registers with."""
        return _registration(self._mock, "worker", self.name, self._address, self._mock.layer)

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        """Return a stage of these layers that spends the simulator's time. configuration: of the ring.
        layers: its range.
        """
        mock, layer = self._mock, CostCurve(self._mock.layer)

        def spend(rows: int) -> None:
            """Sleep as long as the layers take for so many rows."""
            mock.sleep(layer.at(rows) * len(layers))

        body = StageModel(mock.voice, spend, mock.width, mock.plan)
        return MockStage(body, layers, configuration.pages, configuration.page_rows)

    def fetch(self, layers: Range) -> None:
        """Do nothing, since there are no weights. layers: the range to fetch."""

    def preload(self, layers: Range | None = None) -> bool:
        """Return False: nothing has to be loaded ahead. layers: the range to load."""
        return False

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        """Return a verifier whose logits choose the token that the hidden row names. stage: the last stage.
        configuration: of the ring.
        """
        size = read_config(self._mock.model).vocab
        vocabulary = read_vocabulary(self._mock.model, size)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            """Return logits [num_rows, vocab_size] that are 1 for the token in column 2 of each hidden row,
            else 0.
            """
            return torch.zeros(len(hidden), size).scatter_(1, hidden[:, 2:3].long(), 1.0)

        def grammar(opening: Opening) -> Future[Grammar] | None:
            """Return the grammar that an opening asks for; None if it asks for none."""
            return grammar_of(vocabulary, opening) if opening.plan or opening.form else None

        width = configuration.width_at(stage.layers)
        ring = FeatureRing(width, torch.float32, "cpu") if width else None
        return Verifier(logits, grammar, ring)


class MockDrafter:
    """Makes engines without weights, as `specsot_drafter.drafter` describes. mock: the simulator. name,
    address: of the member.
    """

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        self._mock = mock
        self.name = name
        self._address = address

    def registration(self) -> Registration:
        """Return what the drafter registers with, its head and its curve of growth included."""
        mock = self._mock
        return _registration(
            mock,
            "drafter",
            self.name,
            self._address,
            mock.growth,
            head=_head(mock),
            drafters=("eagle",),
            shape=mock.shape,
        )

    def tap_slices(self) -> Mapping[int, Any]:
        """Return, by tapped layer, a tensor of zeros of which only the height, the width of a feature, is
        read.
        """
        head = _head(self._mock)
        return {layer: torch.zeros(head.width, 1) for layer in head.taps}  # its height alone is read

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        """Return an engine whose drafter spends the simulator's time. configuration: of the ring."""
        mock, level = self._mock, CostCurve(self._mock.growth)

        def spend(rows: int) -> None:
            """Sleep as long as a level of so many rows takes."""
            mock.sleep(level.at(rows))

        drafter = OracleDrafter(mock.voice, mock.skill, mock.shape.depth, spend, configuration.pages)
        rule = make_budget("measured", configuration.shape, configuration.curve, mock.growth, drafter.widths)
        vocabulary = read_vocabulary(mock.model, read_config(mock.model).vocab)
        return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary)


def _head(mock: Simulator) -> Head:
    """Return a head that taps the simulator's model as EAGLE-3 does: near the beginning, in the middle, near
    the end.
    """
    layers = read_config(mock.model).layers
    taps = sorted({min(2, layers), layers // 2, max(layers - 3, 0)})
    return Head(tuple(taps), mock.fused)


def _registration(
    mock: Simulator, kind: Any, name: str, address: str, curve: Curve, **fields: Any
) -> Registration:
    """Return what a member registers with.

    mock: the simulator. kind: "worker" or "drafter". name, address: of the member. curve: seconds by rows.
        fields: further fields.
    """
    config = read_config(mock.model)
    return Registration(
        kind=kind,
        name=name,
        address=address,
        fingerprint=fingerprint(mock.model),
        model_layers=config.layers,
        max_positions=config.max_positions,
        kv_bytes=mock.kv_memory,
        row_bytes=256,
        curve=curve,
        **fields,
    )


# Takes as long as so many rows take.
SpendTime = Callable[[int], None]  # takes as long as so many rows take
# Columns of a hidden row that are used: the state's high half, its low half, the next token.
LEAST_WIDTH = 3  # a row: the state's high half, its low half, the next token


@dataclass(frozen=True, slots=True)
class StageModel:
    """What all stages of a ring without weights have in common.

    width: of a hidden row. spend: called with the number of rows of every frame.
    plan: what is written instead where a skeleton is asked for, as long as it lasts.
    """

    voice: FakeLM
    spend: SpendTime
    width: int = LEAST_WIDTH
    plan: tuple[int, ...] = ()


class MockStage:
    """A stage without weights, see `StageRunner`: its KV rows are states of the text before them."""

    uncaptured = 0

    def __init__(self, model: StageModel, layers: Range, pages: int, page_rows: int) -> None:
        """Make a stage with empty pages. model: what all stages share. layers: its range. pages: their
        number. page_rows: rows of a page.
        """
        self.table = PageTable(pages, page_rows)
        self.layers = layers
        self._body = model
        self._states: dict[int, int] = {}
        self._planning: dict[int, int] = {}  # by sequence: where its plan begins
        self._fused = 0

    def tap(self, layer: int, weight: Any) -> None:
        """Let fused rows of the weight's height travel from now on; they are zeros. layer: not used. weight:
        [height, ..].
        """
        self._fused = int(weight.shape[0])

    def prompt_rows(self, rows: int) -> int:
        """Return how many rows of a prompt fit into a frame: as many as `rows`."""
        return rows

    def hold(self) -> None:
        """Do nothing, since no step is ever launched early."""

    def capture(self) -> None:
        """Do nothing, since there is no graph to capture."""

    def run(self, frame: Frame) -> Frame:
        """Return the frame as it leaves this stage. Raises WireError if the stage before saw other texts.

        frame: as it came.
        """
        start_time = time.perf_counter()
        kv_plan = plan_frame(self.table, frame)
        self._planning |= {
            opening.sequence: opening.prompt - opening.generated for opening in frame.openings if opening.plan
        }
        self._move(kv_plan)
        hidden = self._enter(frame, kv_plan) if kv_plan.slots else None
        self._wipe(frame, kv_plan)
        if hidden is not None:
            self._body.spend(len(hidden))
        fused = torch.zeros(len(hidden), self._fused) if hidden is not None and self._fused else frame.fused
        seconds = (*frame.seconds, time.perf_counter() - start_time)
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    def _move(self, kv_plan: KvPlan) -> None:
        """Copy and move states between slots as the plan says, as a stage does with KV rows."""
        page_rows = self.table.page_rows
        states = self._states
        for copy in kv_plan.copies:
            for row in range(copy.rows):
                states[copy.target * page_rows + row] = states[copy.source * page_rows + row]
        moved = [states[source] for source, _ in kv_plan.moves]
        states.update(zip((target for _, target in kv_plan.moves), moved))

    def _wipe(self, frame: Frame, kv_plan: KvPlan) -> None:
        """Drop the states of freed pages, and the plans of closed sequences."""
        page_rows = self.table.page_rows
        for sequence in frame.closings:
            self._planning.pop(sequence, None)
        for page in kv_plan.freed:
            for slot in range(page * page_rows, (page + 1) * page_rows):
                self._states.pop(slot, None)

    def _enter(self, frame: Frame, kv_plan: KvPlan) -> torch.Tensor:
        """Return the rows as they leave, [num_rows, width]; those that came from another stage must be equal.

        frame: as it came. kv_plan: where its rows are. Raises WireError if they differ.
        """
        states = [
            (segment.sequence, state)
            for segment, span in zip(frame.segments, kv_plan.spans)
            for state in self._read(segment, span)
        ]
        self._states.update(zip(kv_plan.slots, (state for _, state in states)))
        row_values = [
            (state >> 16, state & 0xFFFF, self._next(sequence, position, state))
            for position, (sequence, state) in zip(kv_plan.positions, states)
        ]
        hidden = torch.zeros(len(states), max(self._body.width, LEAST_WIDTH))
        hidden[:, :LEAST_WIDTH] = torch.tensor(row_values)
        if self.layers.first and not (frame.hidden is not None and torch.equal(hidden, frame.hidden)):
            raise WireError(f"layers {self.layers} saw other texts in frame {frame.number} than came")
        return hidden

    def _next(self, sequence: int, position: int, state: int) -> int:
        """Return the token that follows the token at `position`: the plan's next one while a plan
        is written.
        """
        plan = self._body.plan
        start = self._planning.get(sequence)
        if start is not None and 0 <= position + 1 - start < len(plan):
            return plan[position + 1 - start]
        return self._body.voice.next(state)

    def _read(self, segment: Segment, span: RowSpan) -> Iterator[int]:
        """Yield the state after every row of a segment: that of its parent and its own token. span: where the
        segment's rows are.
        """
        tree = segment.tree.parents if isinstance(segment, TreeSegment) else None
        states = list[int]()
        for row, token in enumerate(tokens_of(segment)):
            parent = tree[row] if tree else row - 1
            states.append(next_state(states[parent] if row else self._before(span), token))
            yield states[-1]

    def _before(self, span: RowSpan) -> int:
        """Return the state before a segment's first row; EMPTY_STATE at the beginning of a text."""
        if not span.base:
            return EMPTY_STATE
        page, row = divmod(span.base - 1, self.table.page_rows)
        return self._states[span.pages[page] * self.table.page_rows + row]
