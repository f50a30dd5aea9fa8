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
from specsot_worker.feature_store import FeatureStore
from specsot_worker.observer import WorkerObserver
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker

EMPTY_STATE = 0  # the state of an empty text


def next_state(state: int, token: int) -> int:
    """The state (32 bits) behind one more token. It depends on every token before."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


def state_of(tokens: Iterable[int], state: int = EMPTY_STATE) -> int:
    for token in tokens:
        state = next_state(state, token)
    return state


@dataclass(frozen=True, slots=True)
class FakeLM:
    """alphabet: the tokens it writes with. A vocabulary's first ones are seldom text."""

    alphabet: Sequence[int] = range(300, 1324)

    def next(self, state: int) -> int:
        return self.alphabet[state % len(self.alphabet)]

    def write(self, tokens: Iterable[int], count: int) -> list[int]:
        """What plain decoding writes behind `tokens`."""
        state = state_of(tokens)
        written = list[int]()
        for _ in range(count):
            written.append(self.next(state))
            state = next_state(state, written[-1])
        return written

    def knows(self, state: int, skill: float) -> bool:
        """Whether somebody of such `skill` (0..1) guesses right behind this text; always the same answer."""
        return next_state(state, 0) < skill * (1 << 32)


class OracleDrafter(Proposer):
    """Knows the voice, as well as its skill allows. Its trees are chains."""

    def __init__(
        self, voice: FakeLM, skill: float, depth: int, spend: Callable[[int], None], pages: int = 0
    ) -> None:
        """depth: levels at most. spend: called with the rows of every level that is grown.
        pages: what it reports, since it needs none.
        """
        self.widths = (1,) * (depth - 1)
        self._pages = pages
        self._voice = voice
        self._skill = skill
        self._spend = spend
        self._known: dict[int, tuple[int, int]] = {}  # tokens read so far, and the state behind them

    @property
    def free_pages(self) -> int:
        return self._pages

    def follows(self, sequence: int) -> bool:
        return sequence in self._known

    def open(self, sequence: DraftSequence) -> None:
        self._known[sequence.id] = 0, 0

    def close(self, sequence: int) -> None:
        self._known.pop(sequence, None)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """A chain for each, all equally long, as far as another level deserves its time."""
        depths = np.arange(1, levels + 1)
        scores = np.tile(depths * np.log(self._skill or 1e-9), (len(sequences), 1))
        for depth in range(1, levels + 1):
            self._spend(len(sequences))
            if depth < levels and keep_growing and not keep_growing(scores[:, depth - 1 : depth], depth):
                levels = depth
                break
        tokens = np.array([self._chain(text, levels) for text in sequences], np.int64)
        parents = np.tile(depths[:levels] - 1, (len(sequences), 1))
        return Candidates(tokens, scores[:, :levels], parents, depths[:levels])

    def _chain(self, text: DraftSequence, levels: int) -> list[int]:
        state = self._read(text)
        chain = list[int]()
        for _ in range(levels):
            right = self._voice.next(state)
            chain.append(right if self._voice.knows(state, self._skill) else 0)
            state = next_state(state, right)
        return chain

    def _read(self, text: DraftSequence) -> int:
        read_before, state = self._known[text.id]
        state = state_of(text.tokens[read_before:], state)
        self._known[text.id] = len(text.tokens), state
        return state


Sleep = Callable[[float], object]
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
        self, name: str, address: str, dialer: Dialer, compute: Executor, watch: WorkerObserver | None = None
    ) -> Worker:
        return Worker(MockWorker(self, name, address), dialer, compute, observer=watch)

    def drafter(self, name: str, address: str, dialer: Dialer, compute: Executor) -> Drafter:
        return Drafter(MockDrafter(self, name, address), dialer, compute)


def plan_of(model: Path, points: int, length: int) -> tuple[int, ...]:
    """A skeleton of so many points, `length` tokens wished for each, as the model's tokenizer spells it."""
    lines = [f"{n}.<{length}><None>[-]Point {n}\n" for n in range(1, points + 1)]
    return Text(model).encode_bare("[PLAN]\n" + "".join(lines) + "[END]")


class MockWorker:
    """See specsot_worker.stage."""

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        self._mock = mock
        self.name = name
        self._address = address
        self.loaded = self.fetched = 0
        self.vocabulary = read_config(mock.model).vocab

    def registration(self) -> Registration:
        return _registration(self._mock, "worker", self.name, self._address, self._mock.layer)

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        mock, layer = self._mock, CostCurve(self._mock.layer)

        def spend(rows: int) -> None:
            mock.sleep(layer.at(rows) * len(layers))

        body = StageModel(mock.voice, spend, mock.width, mock.plan)
        return MockStage(body, layers, configuration.pages, configuration.page_rows)

    def fetch(self, layers: Range) -> None:
        """There are no weights."""

    def preload(self, layers: Range | None = None) -> bool:
        return False

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        size = read_config(self._mock.model).vocab
        vocabulary = read_vocabulary(self._mock.model, size)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(hidden), size).scatter_(1, hidden[:, 2:3].long(), 1.0)

        def grammar(opening: Opening) -> Future[Grammar] | None:
            return grammar_of(vocabulary, opening) if opening.plan or opening.form else None

        pages = (configuration.pages, configuration.page_rows)
        width = configuration.width_at(stage.layers)
        store = FeatureStore(*pages, width, torch.float32, "cpu") if width else None
        return Verifier(logits, grammar, store)


class MockDrafter:
    """See specsot_drafter.drafter."""

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        self._mock = mock
        self.name = name
        self._address = address

    def registration(self) -> Registration:
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
        head = _head(self._mock)
        return {layer: torch.zeros(head.width, 1) for layer in head.taps}  # its height alone is read

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        mock, level = self._mock, CostCurve(self._mock.growth)

        def spend(rows: int) -> None:
            mock.sleep(level.at(rows))

        drafter = OracleDrafter(mock.voice, mock.skill, mock.shape.depth, spend, configuration.pages)
        rule = make_budget("measured", configuration.shape, configuration.curve, mock.growth, drafter.widths)
        vocabulary = read_vocabulary(mock.model, read_config(mock.model).vocab)
        return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary)


def _head(mock: Simulator) -> Head:
    """As EAGLE-3 taps: near the beginning, in the middle, near the end."""
    layers = read_config(mock.model).layers
    taps = sorted({min(2, layers), layers // 2, max(layers - 3, 0)})
    return Head(tuple(taps), mock.fused)


def _registration(
    mock: Simulator, kind: Any, name: str, address: str, curve: Curve, **more: Any
) -> Registration:
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
        **more,
    )


SpendTime = Callable[[int], None]  # takes as long as so many rows take
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
    """See `StageRunner`."""

    uncaptured = 0

    def __init__(self, body: StageModel, layers: Range, pages: int, page_rows: int) -> None:
        self.table = PageTable(pages, page_rows)
        self.layers = layers
        self._body = body
        self._states: dict[int, int] = {}
        self._planning: dict[int, int] = {}  # by sequence: where its plan begins
        self._fused = 0

    def tap(self, layer: int, weight: Any) -> None:
        """Fused rows of the weight's height travel from now on; they say nothing."""
        self._fused = int(weight.shape[0])

    def prompt_rows(self, rows: int) -> int:
        return rows

    def hold(self) -> None:
        """Nothing is ever begun early."""

    def capture(self) -> None:
        """Nothing would make it quicker."""

    def run(self, frame: Frame) -> Frame:
        """Raises WireError when the stage before saw other texts."""
        begun = time.perf_counter()
        arrangement = plan_frame(self.table, frame)
        self._planning |= {one.sequence: one.prompt - one.generated for one in frame.openings if one.plan}
        self._move(arrangement)
        hidden = self._enter(frame, arrangement) if arrangement.slots else None
        self._wipe(frame, arrangement)
        if hidden is not None:
            self._body.spend(len(hidden))
        fused = torch.zeros(len(hidden), self._fused) if hidden is not None and self._fused else frame.fused
        seconds = (*frame.seconds, time.perf_counter() - begun)
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    def _move(self, arrangement: KvPlan) -> None:
        size = self.table.page_rows
        states = self._states
        for copy in arrangement.copies:
            for row in range(copy.rows):
                states[copy.target * size + row] = states[copy.source * size + row]
        moved = [states[source] for source, _ in arrangement.moves]
        states.update(zip((target for _, target in arrangement.moves), moved))

    def _wipe(self, frame: Frame, arrangement: KvPlan) -> None:
        size = self.table.page_rows
        for sequence in frame.closings:
            self._planning.pop(sequence, None)
        for page in arrangement.freed:
            for slot in range(page * size, (page + 1) * size):
                self._states.pop(slot, None)

    def _enter(self, frame: Frame, arrangement: KvPlan) -> torch.Tensor:
        """[rows, width] the rows as they leave; those that came must say the same."""
        found = [
            (segment.sequence, state)
            for segment, span in zip(frame.segments, arrangement.spans)
            for state in self._read(segment, span)
        ]
        self._states.update(zip(arrangement.slots, (state for _, state in found)))
        said = [
            (state >> 16, state & 0xFFFF, self._next(sequence, position, state))
            for position, (sequence, state) in zip(arrangement.positions, found)
        ]
        hidden = torch.zeros(len(found), max(self._body.width, LEAST_WIDTH))
        hidden[:, :LEAST_WIDTH] = torch.tensor(said)
        if self.layers.first and not (frame.hidden is not None and torch.equal(hidden, frame.hidden)):
            raise WireError(f"layers {self.layers} saw other texts in frame {frame.number} than came")
        return hidden

    def _next(self, sequence: int, position: int, state: int) -> int:
        """What follows the token at `position`."""
        plan = self._body.plan
        start = self._planning.get(sequence)
        if start is not None and 0 <= position + 1 - start < len(plan):
            return plan[position + 1 - start]
        return self._body.voice.next(state)

    def _read(self, segment: Segment, span: RowSpan) -> Iterator[int]:
        """The state behind every row: of its parent's text and its own token."""
        tree = segment.tree.parents if isinstance(segment, TreeSegment) else None
        states = list[int]()
        for row, token in enumerate(tokens_of(segment)):
            parent = tree[row] if tree else row - 1
            states.append(next_state(states[parent] if row else self._before(span), token))
            yield states[-1]

    def _before(self, span: RowSpan) -> int:
        if not span.base:
            return EMPTY_STATE
        page, row = divmod(span.base - 1, self.table.page_rows)
        return self._states[span.pages[page] * self.table.page_rows + row]
