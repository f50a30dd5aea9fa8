"""A ring without weights: a worker and a drafter that compute tokens as a pure function of the tokens before.

A stage's KV rows are checksums of the tokens before them. A row that sees a wrong page, move or mask has
another checksum, so that the answer differs, or the next stage refuses the frame.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

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

# The state of a sequence without tokens.
EMPTY_STATE: Final = 0


def next_state(state: int, token: int) -> int:
    """Return the state after one more token, an integer of 32 bits that depends on every token so far.

    state: The state after the tokens before; EMPTY_STATE if there are none.
    token: The id of the token that follows them.
    """
    return zlib.crc32(token.to_bytes(4, "little"), state)


def state_of(tokens: Iterable[int], state: int = EMPTY_STATE) -> int:
    """Return the state after these tokens; `state` itself if there are none.

    tokens: Token ids, in order.
    state: The state after the tokens before them; EMPTY_STATE if there are none.
    """
    for token in tokens:
        state = next_state(state, token)
    return state


@dataclass(frozen=True, slots=True)
class FakeLM:
    """A language model whose next token is a function of the state after the tokens before.

    alphabet: The token ids that the model writes. They are not the first ids of a vocabulary, which are
        seldom text.
    """

    alphabet: Sequence[int] = range(300, 1324)

    def next(self, state: int) -> int:
        """Return the token that follows a sequence.

        state: The state after the sequence, see `state_of`.
        """
        return self.alphabet[state % len(self.alphabet)]

    def write(self, tokens: Iterable[int], num_tokens: int) -> list[int]:
        """Return the `num_tokens` token ids that greedy decoding without speculation writes after a prompt.

        tokens: The prompt's token ids; may be empty. num_tokens: How many tokens are written. 0 or less: the
        result is [].
        """
        state = state_of(tokens)
        written = list[int]()
        for _ in range(num_tokens):
            written.append(self.next(state))
            state = next_state(state, written[-1])
        return written

    def knows(self, state: int, skill: float) -> bool:
        """Return whether a drafter predicts the token after a sequence correctly. The answer for one state is
        always the same.

        state: The state after the sequence.
        skill: The fraction of states, 0..1, after which the drafter is right.
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
        """Prepare to draft; no sequence is open yet.

        language_model: The model whose tokens are predicted.
        skill: The probability, 0..1, that a draft is right.
        max_depth: Maximum number of levels of a tree.
        spend_time: Called for every level that is grown, with the number of its rows.
        num_pages: The number of free pages to report. The drafter itself needs none.

        `widths`, the number of nodes of each level after the first, is 1 for all max_depth - 1 levels.
        """
        self.widths = (1,) * (max_depth - 1)
        self._pages = num_pages
        self._language_model = language_model
        self._skill = skill
        self._spend = spend_time
        # By open sequence: the number of its tokens that were read, and the state after them.
        self._known: dict[int, tuple[int, int]] = {}

    @property
    def free_pages(self) -> int:
        """Return the number of free pages that the drafter reports, which never changes."""
        return self._pages

    def follows(self, sequence: int) -> bool:
        """Return whether a sequence is open.

        sequence: The sequence's id.
        """
        return sequence in self._known

    def open(self, sequence: DraftSequence) -> None:
        """Open a sequence, of which nothing has been read yet.

        sequence: The sequence; its tokens are read when a tree is proposed.
        """
        self._known[sequence.id] = 0, 0

    def close(self, sequence: int) -> None:
        """Close a sequence; an unknown id has no effect.

        sequence: The sequence's id.
        """
        self._known.pop(sequence, None)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return a chain for each sequence, all equally long. A chain ends early if growing another level is
        not profitable.

        sequences: The sequences that need a tree.
        levels: Maximum number of levels, at least 1.
        keep_growing: Asked after each level but the last whether to grow another one; None: all levels are
            grown.

        Returns candidates with one node per level: token ids [num_sequences, depth], the log-probability of
        each node [num_sequences, depth] (level times log(skill)), the parent of each node (the level before;
        0 is the root), and the level of each node, counted from 1. The result is never None. `keep_growing`
        is called with the scores of the level just grown and its number; if it returns False, that level is
        the last one. A skill of 0 counts as 1e-9 in the scores. `spend_time` was given to the constructor and
        is called once for every level grown. Raises KeyError if a sequence is not open.
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
        """Return the drafted tokens of a sequence, one for each level. Where the drafter is wrong, the draft
        is token 0.

        sequence: The sequence to draft for.
        levels: The number of tokens.

        A wrong draft does not end the chain: the next token continues what the language model would have
        written. The tokens that were read are remembered for the sequence.
        """
        state = self._state_after(sequence)
        chain = list[int]()
        for _ in range(levels):
            next_token = self._language_model.next(state)
            chain.append(next_token if self._language_model.knows(state, self._skill) else 0)
            state = next_state(state, next_token)
        return chain

    def _state_after(self, sequence: DraftSequence) -> int:
        """Return the state after all known tokens of a sequence. Only tokens that were not read before are
        read.

        sequence: An open sequence.

        Raises KeyError if the sequence is not open.
        """
        num_read, state = self._known[sequence.id]
        state = state_of(sequence.tokens[num_read:], state)
        self._known[sequence.id] = len(sequence.tokens), state
        return state


# Waits for that many seconds.
Sleep = Callable[[float], object]
# Seconds by rows: a negligible time, but not 0, because costs are divisors.
FREE: Curve = ((1, 1e-5), (64, 1e-5))


@dataclass(frozen=True, slots=True)
class Simulator:
    """A ring without weights.

    model: Directory of the model from which the tokenizer, the vocabulary and the number of layers are read.
    language_model: The function that writes the tokens.
    plan: The token ids that are written where a skeleton is asked for, see `plan_of`. Empty: a skeleton has
        the language model's tokens where the grammar allows them, else the first token that it allows.
    layer: Seconds that one layer takes, by the number of rows of a frame.
    growth: Seconds that one level of all trees together takes, by its number of rows.
    sleep: Spends these seconds; tests pass a function that does not wait.
    skill: The probability, 0..1, that a drafted token is right if the drafts above it are. The drafter's
        scores report the same probability.
    shape: The largest tree that the drafter grows.
    width: Columns of a hidden row, fp32; at least MIN_WIDTH.
    fused: Columns of a fused feature row, fp32. The layers that are tapped are those of an EAGLE-3 head of
        this model.
    kv_memory: Bytes for KV on each member. A row takes 256 bytes per layer.
    """

    model: Path
    language_model: FakeLM = field(default_factory=FakeLM)
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

        name: The member's name.
        address: The address at which the member listens.
        dialer: Connects the member to other members.
        compute: The executor on which its stage runs.
        observer: Called with every frame of the worker; None: nothing is observed.
        """
        return Worker(MockWorker(self, name, address), dialer, compute, observer=observer)

    def drafter(self, name: str, address: str, dialer: Dialer, compute: Executor) -> Drafter:
        """Return a drafter of this ring.

        name: The member's name.
        address: The address at which the member listens.
        dialer: Connects the member to other members.
        compute: The executor on which its engine runs.
        """
        return Drafter(MockDrafter(self, name, address), dialer, compute)


def plan_of(model: Path, points: int, length: int) -> tuple[int, ...]:
    """Return the token ids of a skeleton, as the model's tokenizer encodes it.

    model: Directory of the model with the tokenizer.
    points: Number of points of the skeleton; 0 gives a plan without points.
    length: Number of tokens that each point asks for.
    """
    lines = [f"{n}.<{length}><None>[-]Point {n}\n" for n in range(1, points + 1)]
    return Text(model).encode_prompt("[PLAN]\n" + "".join(lines) + "[END]")


class MockWorker:
    """Makes stages without weights, with the interface that `specsot_worker.stage_provider` describes.

    mock: The simulator.
    name: The member's name.
    address: The address at which the member listens.
    """

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        """Read the vocabulary size from the model's config. `loaded` and `fetched` stay 0, since no weights
        are loaded or fetched.

        mock: The simulator.
        name: The member's name.
        address: The address at which the member listens.
        """
        self._mock = mock
        self.name = name
        self._address = address
        self.loaded = self.fetched = 0
        self.vocabulary = read_config(mock.model).vocab

    def registration(self) -> Registration:
        """Return what the worker registers with. Its costs are those of one layer."""
        return _registration(self._mock, "worker", self.name, self._address, self._mock.layer)

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        """Return a stage that takes the simulator's time.

        configuration: The ring's configuration, from which the number of pages and their size are read.
        layers: The stage's layer range.

        The returned stage sleeps, for each frame, as long as one layer takes for the frame's number of rows,
        times the number of its layers.
        """
        mock, layer = self._mock, CostCurve(self._mock.layer)

        def spend(rows: int) -> None:
            """Sleep as long as the layers take.

            rows: Number of rows of the frame.
            """
            mock.sleep(layer.at(rows) * len(layers))

        body = StageModel(mock.language_model, spend, mock.width, mock.plan)
        return MockStage(body, layers, configuration.pages, configuration.page_rows)

    def fetch(self, layers: Range) -> None:
        """Do nothing, since there are no weights.

        layers: The range to fetch.
        """

    def preload(self, layers: Range | None = None) -> bool:
        """Return False: there is nothing more to load.

        layers: The layer range to load; None: what a later epoch may need.
        """
        return False

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        """Return a verifier whose logits choose the token that each hidden row names. It has a feature store
        if the ring's drafter reads features of this stage.

        stage: The last stage.
        configuration: The ring's configuration.

        A sequence gets a grammar only if its opening asks for a plan or a form. There is no feature store if
        the configuration's width at this stage is 0.
        """
        size = read_config(self._mock.model).vocab
        vocabulary = read_vocabulary(self._mock.model, size)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            """Return logits [num_rows, vocab_size] that are 1 for the token in column 2 of each hidden row,
            and 0 elsewhere.

            hidden: Hidden rows, [num_rows, width].
            """
            return torch.zeros(len(hidden), size).scatter_(1, hidden[:, 2:3].long(), 1.0)

        def grammar(opening: Opening) -> Future[Grammar] | None:
            """Return the grammar that an opening asks for; None if it asks for none.

            opening: The opening of a sequence.
            """
            return grammar_of(vocabulary, opening) if opening.plan or opening.form else None

        width = configuration.width_at(stage.layers)
        ring = FeatureRing(width, torch.float32, "cpu") if width else None
        return Verifier(logits, grammar, ring)


class MockDrafter:
    """Makes engines without weights, with the interface that `specsot_drafter.drafter` describes.

    mock: The simulator.
    name: The member's name.
    address: The address at which the member listens.
    """

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        """Store the arguments; nothing is loaded.

        mock: The simulator.
        name: The member's name.
        address: The address at which the member listens.
        """
        self._mock = mock
        self.name = name
        self._address = address

    def registration(self) -> Registration:
        """Return what the drafter registers with, its head and its growth curve included."""
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
        """Return a tensor of zeros for each tapped layer, [width of a feature, 1], of which only the height
        is read.
        """
        head = _head(self._mock)
        return {layer: torch.zeros(head.width, 1) for layer in head.taps}

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        """Return an engine whose drafter takes the simulator's time.

        configuration: The ring's configuration.

        The engine has one drafter, "eagle", whose trees are as large as is profitable by the simulator's
        growth curve and the configuration's step curve, within the configuration's shape.
        """
        mock, level = self._mock, CostCurve(self._mock.growth)

        def spend(rows: int) -> None:
            """Sleep as long as growing a level takes.

            rows: Number of rows of the level.
            """
            mock.sleep(level.at(rows))

        drafter = OracleDrafter(mock.language_model, mock.skill, mock.shape.depth, spend, configuration.pages)
        rule = make_budget(
            "measured",
            configuration.shape,
            configuration.curve,
            mock.growth,
            drafter.widths,
            overlapping_stages=configuration.overlapping_stages,
        )
        vocabulary = read_vocabulary(mock.model, read_config(mock.model).vocab)
        return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary)


def _head(mock: Simulator) -> Head:
    """Return a head that taps the simulator's model as EAGLE-3 does: a layer near the beginning, one in the
    middle and one near the end. A model with few layers has fewer taps.

    mock: The simulator.

    Layers are at most three: the second (or the last one of a smaller model), the middle one, and the third
    last (at least 0); equal ones count once. Its features have the simulator's `fused` columns.
    """
    layers = read_config(mock.model).layers
    taps = sorted({min(2, layers), layers // 2, max(layers - 3, 0)})
    return Head(tuple(taps), mock.fused)


def _registration(
    mock: Simulator, kind: Any, name: str, address: str, curve: Curve, **fields: Any
) -> Registration:
    """Return what a member registers with.

    mock: The simulator.
    kind: "worker" or "drafter".
    name: The member's name.
    address: The address at which the member listens.
    curve: Seconds by rows that the member reports as its costs.
    fields: Further fields of the registration.
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


# Takes as long as a forward pass over that many rows takes.
SpendTime = Callable[[int], None]
# Columns. The least width of a hidden row, of which three columns are used: the state's high 16 bits, its low
# 16 bits, and the next token.
MIN_WIDTH: Final = 3


@dataclass(frozen=True, slots=True)
class StageModel:
    """What all stages of a ring without weights have in common.

    language_model: The function that writes the tokens.
    spend: Called with the number of rows of every frame, to take their time.
    width: Columns of a hidden row; fewer than MIN_WIDTH count as MIN_WIDTH.
    plan: The tokens that are written where a skeleton is asked for. After its last token the language model
        continues.
    """

    language_model: FakeLM
    spend: SpendTime
    width: int = MIN_WIDTH
    plan: tuple[int, ...] = ()


class MockStage:
    """A stage without weights, with the interface of `StageRunner`. Its KV rows are the states after the
    tokens before.

    uncaptured: Always 0: the stage has no graphs, so no step misses one.
    """

    uncaptured = 0

    def __init__(self, model: StageModel, layers: Range, pages: int, page_rows: int) -> None:
        """Make a stage with empty pages.

        model: What all stages share.
        layers: The stage's layer range.
        pages: Number of KV pages.
        page_rows: Rows of a page.

        No KV state is stored, no plan is being written, and no features are sent until `tap` is called.
        """
        self.table = PageTable(pages, page_rows)
        self.layers = layers
        self._body = model
        self._states: dict[int, int] = {}
        # By open sequence that writes a plan: the position of the plan's first token.
        self._planning: dict[int, int] = {}
        self._fused = 0

    def tap(self, layer: int, weight: Any) -> None:
        """Send fused rows from now on, as wide as the weight is high. They are zeros.

        layer: The tapped layer; not used.
        weight: A tensor [width of a fused row, ...], of which only the height is read.
        """
        self._fused = int(weight.shape[0])

    def prompt_rows(self, rows: int) -> int:
        """Return the maximum number of prompt rows in a frame, which is `rows`.

        rows: Maximum number of rows of other frames.
        """
        return rows

    def pause_compute_timer(self) -> None:
        """Do nothing, since the stage never launches a step before its frame arrives."""

    def capture(self) -> None:
        """Do nothing, since there is no graph to capture."""

    def run(self, frame: Frame) -> Frame:
        """Return the frame as it leaves this stage, with the seconds that the stage took. A frame without
        rows leaves without hidden rows.

        frame: The frame as it arrived.

        Raises WireError if the stage before has computed other rows.

        The hidden rows [num_rows, width] hold, in the first three columns, the state's high and low 16 bits
        and the next token. After `tap`, the frame's fused features become zeros [num_rows, width of a fused
        row]; without `tap`, or without rows, they pass through unchanged. Pages that the frame frees are
        forgotten, and so are the plans of sequences that it closes; an opening with a plan is remembered
        until then.
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
        """Copy and move states between slots, as a stage does with KV rows.

        kv_plan: The frame's copies of pages and moves of slots. All moves are read before one is written.

        Raises KeyError if a source slot holds no state, which means that a page or a move was wrong.
        """
        page_rows = self.table.page_rows
        states = self._states
        for copy in kv_plan.copies:
            for row in range(copy.rows):
                states[copy.target * page_rows + row] = states[copy.source * page_rows + row]
        moved = [states[source] for source, _ in kv_plan.moves]
        states.update(zip((target for _, target in kv_plan.moves), moved))

    def _wipe(self, frame: Frame, kv_plan: KvPlan) -> None:
        """Drop the states of freed pages, and the plans of closed sequences.

        frame: The frame, from which the closed sequences are read.
        kv_plan: The frame's plan, which names the freed pages.

        Sequences without a plan and slots without a state are skipped.
        """
        page_rows = self.table.page_rows
        for sequence in frame.closings:
            self._planning.pop(sequence, None)
        for page in kv_plan.freed:
            for slot in range(page * page_rows, (page + 1) * page_rows):
                self._states.pop(slot, None)

    def _enter(self, frame: Frame, kv_plan: KvPlan) -> torch.Tensor:
        """Return the frame's rows as they leave, [num_rows, width], and store their states. Rows that come
        from another stage must equal those computed here.

        frame: The frame as it arrived.
        kv_plan: The slots and positions of the frame's rows.

        Raises WireError if the rows differ.

        The first stage does not compare. Any other stage raises WireError also if the frame has no hidden
        rows or rows of another shape.
        """
        states = [
            (segment.sequence, state)
            for segment, span in zip(frame.segments, kv_plan.spans)
            for state in self._row_states(segment, span)
        ]
        self._states.update(zip(kv_plan.slots, (state for _, state in states)))
        row_values = [
            (state >> 16, state & 0xFFFF, self._next(sequence, position, state))
            for position, (sequence, state) in zip(kv_plan.positions, states)
        ]
        hidden = torch.zeros(len(states), max(self._body.width, MIN_WIDTH))
        hidden[:, :MIN_WIDTH] = torch.tensor(row_values)
        if self.layers.first and not (frame.hidden is not None and torch.equal(hidden, frame.hidden)):
            raise WireError(
                f"layers {self.layers} computed other rows of frame {frame.number} than the stage before sent"
            )
        return hidden

    def _next(self, sequence: int, position: int, state: int) -> int:
        """Return the token that follows the token at a position: the plan's next token while a plan is
        written, otherwise the language model's.

        sequence: The sequence's id.
        position: Position of the last known token, counted from 0.
        state: The state after that token.

        Before the plan's first token, after its last one, and for sequences without a plan, the language
        model's token is returned. Position `start` - 1 is followed by the plan's first token.
        """
        plan = self._body.plan
        start = self._planning.get(sequence)
        if start is not None and 0 <= position + 1 - start < len(plan):
            return plan[position + 1 - start]
        return self._body.language_model.next(state)

    def _row_states(self, segment: Segment, span: RowSpan) -> Iterator[int]:
        """Yield the state after every row of a segment, computed from its parent's state and its own token.

        segment: Rows of a prompt, or the nodes of a tree.
        span: The pages and slots of the segment's rows.

        The first row follows the state before the segment, read from the KV slots. A row of a tree follows
        its parent node, which an earlier part of the frame may have carried, and a row of a prompt the row
        before it.
        """
        tree = segment.tree.parents if isinstance(segment, TreeSegment) else None
        first = span.tail - span.rows
        states = [self._state_at(span, span.base + node) for node in range(first)]
        for row, token in enumerate(tokens_of(segment), first):
            parent = tree[row] if tree else row - 1
            states.append(next_state(states[parent] if row else self._state_at(span, span.base - 1), token))
            yield states[-1]

    def _state_at(self, span: RowSpan, column: int) -> int:
        """Return the state that a column of a segment's sequence holds; EMPTY_STATE before its first column.

        span: The pages and slots of the segment's rows.
        column: Number of the column; -1: the one before the sequence.

        Raises KeyError if the column's slot holds no state.
        """
        if column < 0:
            return EMPTY_STATE
        page, row = divmod(column, self.table.page_rows)
        return self._states[span.pages[page] * self.table.page_rows + row]
