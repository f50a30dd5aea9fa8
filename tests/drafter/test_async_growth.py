"""Drafts that a device begins behind a verdict that its host has not read are those it would ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count, takewhile
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Close, FeatureBatch, Open, Opening, TreeSegment
from specsot.core.overlap import OverlapEvent, OverlapState
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, single
from specsot.errors import ModelError
from specsot.grammar import Grammar
from specsot.members import Configuration, TreeShape
from specsot_bench.eagle.generation import StepLoop
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.budget import ROOT_ONLY, UNKNOWN_SECONDS, FixedBudget, StepSeconds, TreeOutcome
from specsot_drafter.core.selection import Candidates, ChosenNodes
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DueRows, FollowedSequence
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import FusedHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.overlap.device_growth import DeviceGrowth
from specsot_drafter.overlap.device_selection import DeviceChoice
from specsot_drafter.overlap.graph_growth import TreeGraphs
from specsot_drafter.proposers import Proposer, eagle
from specsot_drafter.speculator import Speculator
from specsot_model.cuda_graphs import Captured, CapturedSteps, GraphCapture, Work
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.step_rows import FilledStep, Outputs
from specsot_worker import sampling
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from tests.conftest import some
from tests.eager_steps import EagerSteps
from tests.models import Shape, write_base, write_head

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.growing import grow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = TreeShape(1, 2, 5, fixed=True)
PAGES, PAGE, EPOCH = 24, 16, 1
LIMITS = {1: 7, 2: 3, 3: 10, 4: 5}  # tokens that each may write
COMES = {4: 2}  # step before which one comes

Seen = list[tuple[dict[int, tuple[int, ...]], dict[int, Tree]]]


def at_once(work: Work) -> Captured:
    """What a graph does, when it is told to."""
    return work, (torch.empty(0), None)


class Told:
    """Draws as `sampling` does, and tells of targets before they are read, as a device's kernel can."""

    def __init__(self, wrong: bool) -> None:
        self._choose, self._wrong = sampling.choose_tokens, wrong

    def __call__(
        self, logits: torch.Tensor, requests: Sequence[Any], meanwhile: Callable[[Any], None] | None = None
    ) -> list[int | None]:
        tokens = self._choose(logits, requests)
        if meanwhile:
            said = torch.tensor([-1 if token is None else token for token in tokens], dtype=torch.int32)
            meanwhile((said + 1 if self._wrong else said).to(logits.device))
        return tokens


@dataclass(frozen=True)
class Held:
    """A form that says which tokens stand at some places, and which do not. Its state is the place."""

    given: Mapping[int, int]
    barred: Mapping[int, int]
    vocabulary: Any = None

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return state + 1 if self.allows(state, token, 1) else None

    def finished(self, state: int) -> bool:
        return False

    def forced(self, state: int) -> tuple[int, ...]:
        return tuple(self.given[at] for at in takewhile(self.given.__contains__, count(state)))

    def mask(self, state: int, remaining: int) -> np.ndarray:
        return np.array([self.allows(state, token, remaining) for token in range(512)])

    def allows(self, state: int, token: int, remaining: int) -> bool:
        return self.given.get(state, token) == token != self.barred.get(state)


def write(
    folder: Path,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
    wrong: bool = False,
    unread: bool = False,
    held: Mapping[int, Held] = MappingProxyType({}),
) -> tuple[Seen, list[bool], int, EagerSteps | GraphSteps]:
    """What each step wrote and which trees it ended with, but for those of texts that may end in them;
    whether
    each growth was begun early; free pages.
    """
    taken = list[bool]()

    class Proposer(eagle.EagleProposer):
        started: AsyncGrowth | None = None

        def start_growth(self, *given: Any) -> AsyncGrowth | None:
            self.started = super().start_growth(*given) if early else None
            return self.started

        def begin(self, *given: Any) -> Any:
            offer = super().begin(*given)
            taken.append(self.started is not None and self.started.confirmed)
            self.started = None
            return offer

    def graphs(head: DraftHead, memory: Any, shape: TreeShape, _: object) -> TreeGraphs:
        capture = GraphCapture() if DEVICE == "cuda" else at_once
        return TreeGraphs(FusedHead(head), memory, shape.top_k, shape.depth + 1, capture, grow, (4,))  # type: ignore[arg-type]

    monkeypatch.setattr(eagle, "_graphs", graphs)
    monkeypatch.setattr(eagle, "WARMUP_ROWS", ())
    monkeypatch.setattr(sampling, "choose_tokens", Told(wrong))
    decoder = Decoder.load(folder / "base", None, torch.float16, DEVICE)
    head = load_head(folder / "head", folder / "base", torch.float16, DEVICE)
    stage = DecoderStage(decoder, PAGES, PAGE)
    for layer, weight in head.tap_slices().items():
        stage.tap(layer, weight)
    store = FeatureRing(head.width, decoder.dtype, DEVICE)
    proposer = Proposer(head, SHAPE, PAGES, PAGE)
    told = Configuration(EPOCH, "d", (), PAGES, PAGE, SHAPE.slots, 64, shape=SHAPE)
    engine = DraftEngine({"eagle": (proposer, FixedBudget(SHAPE))}, told)
    sequencer = Sequencer(
        EPOCH, FrameBudget(64, 1, SHAPE.slots), PageTable(PAGES, PAGE), DraftTimeout(0.0, True)
    )
    steps = make_steps(decoder, stage._kv, dict(stage._taps), unread)
    find = cast(Callable[[Opening], Grammar | None], lambda opening: held.get(opening.sequence))
    stage.run_by(steps)
    loop = StepLoop(stage, Verifier(decoder.logits, find, store, stage), sequencer, engine)
    seen, left = Seen(), dict(LIMITS)
    while True:
        for sequence in (one for one in LIMITS if COMES.get(one, 0) == len(seen)):
            prompt = tuple(range(7 * sequence, 7 * sequence + 5))
            opening = Opening(sequence, 5, drafted=True, limit=LIMITS[sequence])
            sequencer.apply_order(Open(opening, prompt, 1000))
        if len(seen) == 3:
            sequencer.apply_order(Close(3))
        try:
            step = loop.turn()
        except ModelError:
            return seen, taken, proposer.free_pages, steps
        for one in step.result.outcomes:
            left[one.sequence] -= len(one.tokens)
        whole = {sequence: tree for sequence, tree in loop.trees.items() if left[sequence] > SHAPE.depth + 2}
        seen.append(({one.sequence: one.tokens for one in step.result.outcomes}, whole))


class GraphSteps(CapturedSteps):
    """The same of graphs."""

    launched = unread = 0
    takes = False

    @property
    def accepts_device_trees(self) -> bool:
        return self.takes and super().accepts_device_trees

    def launch(self, filled: FilledStep, entry: Any) -> Outputs:
        self.launched += 1
        return super().launch(filled, entry)

    def launch_device_trees(self, filled: FilledStep, roots: Sequence[int], trees: DeviceTrees) -> Outputs:
        self.launched += 1
        self.unread += 1
        return super().launch_device_trees(filled, roots, trees)


def make_steps(
    decoder: Decoder, kv: KVPages, taps: dict[int, Any], accepts_device_trees: bool
) -> EagerSteps | GraphSteps:
    if DEVICE == "cpu":
        return EagerSteps(decoder, kv, taps, accepts_device_trees)
    steps = GraphSteps(decoder, kv, taps, GraphCapture(), (16, 32))
    steps.takes = accepts_device_trees
    return steps


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a head of few attention heads: kernels are interpreted."""
    folder, few = tmp_path_factory.mktemp("pair"), Shape(layers=6, heads=2, kv_heads=1)
    write_base(folder / "base", few)
    write_head(folder / "head", few)
    return folder


@pytest.fixture(scope="module")
def late(pair: Path) -> tuple[Seen, list[bool], int, EagerSteps]:
    """What is written where nothing is begun early."""
    with pytest.MonkeyPatch.context() as patch:
        return write(pair, False, patch)


@pytest.mark.parametrize(
    ("wrong", "unread"),
    [(False, False), (False, True), (True, True)],
    ids=["chosen by the host", "chosen by the device", "wrong"],
)
def test_trees_are_those_that_are_grown_when_the_host_knows(
    pair: Path,
    late: tuple[Seen, list[bool], int, EagerSteps],
    monkeypatch: pytest.MonkeyPatch,
    wrong: bool,
    unread: bool,
) -> None:
    """Texts come, end and are closed meanwhile. Where the device had said what was not so, trees grow anew,
    and steps that were launched with others have never been.
    """
    wanted, never, pages, _ = late
    found, taken, free, steps = write(pair, True, monkeypatch, wrong, unread)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert not any(never)
    assert taken == [False] + [True] * (len(taken) - 1), "all but behind prompts alone"
    assert (steps.unread > 2) == unread
    # A prompt that rides with launched trees has a pass of its own; wrong trees are launched in vain.
    others, rows = steps.unread if wrong else 1, len(found) - 1
    assert steps.launched == rows + others
    assert free == pages == PAGES
    trees, late_trees = ([dict(trees) for _, trees in seen] for seen in (found, wanted))
    first = late_trees[COMES[4]].pop(4)
    assert trees[COMES[4]].pop(4) == single(first.tokens[0]), "trees of others do not wait for its prompt"
    assert trees == late_trees


@pytest.fixture(scope="module")
def late_held(
    pair: Path, late: tuple[Seen, list[bool], int, EagerSteps]
) -> tuple[Mapping[int, Held], tuple[Seen, list[bool], int, EagerSteps]]:
    """Two forms, and what is written with them if no growth begins before its verification is read."""
    held = {1: Held({3: 7, 4: 9}, {}), 4: Held({}, {3: written(late[0])[4][3]})}
    with pytest.MonkeyPatch.context() as patch:
        return held, write(pair, False, patch, held=held)


@pytest.mark.parametrize("unread", some([False, True], 1), ids=["chosen by the host", "chosen by the device"])
def test_constrained_sequences_continue_with_asynchronous_growth(
    pair: Path,
    late: tuple[Seen, list[bool], int, EagerSteps],
    late_held: tuple[Mapping[int, Held], tuple[Seen, list[bool], int, EagerSteps]],
    monkeypatch: pytest.MonkeyPatch,
    unread: bool,
) -> None:
    """Beside free ones. Where a form forbids what the device had said, what grew of it has never been."""
    free = written(late[0])
    held, (wanted, never, pages, _) = late_held
    found, taken, left, steps = write(pair, True, monkeypatch, unread=unread, held=held)
    texts = written(found)
    assert texts == written(wanted)
    assert texts[1][3:5] == (7, 9)
    assert texts[4][:3] == free[4][:3]
    assert texts[4][3] != free[4][3]
    assert not any(never)
    assert taken.count(False) <= 1 + 3, "behind prompts, and where a form forbids what the model would have"
    assert any(taken)
    assert (steps.unread > 0) == unread
    assert left == pages == PAGES


def written(seen: Seen) -> dict[int, tuple[int, ...]]:
    """By sequence, all of it."""
    return {one: sum((tokens.get(one, ()) for tokens, _ in seen), ()) for one in LIMITS}


def test_features_beyond_what_the_device_stores_are_the_hosts() -> None:
    """Trees that others' candidates joined may go deeper than the head's own."""
    early = DeviceGrowth.launched({7: (0, 4)}, 2, lambda: pytest.fail("nobody reads"))
    assert not early.covers(FeatureBatch(7, 4, (1, 2, 3), 4, 1))


def test_a_sequence_that_is_fed_again_has_features_of_its_own_step() -> None:
    early = DeviceGrowth.launched({7: (0, 4)}, 2, lambda: pytest.fail("nobody reads"))
    assert early.covers(FeatureBatch(7, 4, (1, 2), 3, 1))
    assert not early.covers(FeatureBatch(7, 4, (1, 2), 3, 2))


def test_nothing_is_used_of_a_batch_unless_all_its_sequences_continue() -> None:
    """The due rows of these sequences are requested again, without asynchronous growth."""
    texts = [FollowedSequence(begun(sequence), extended=at) for sequence, at in ((7, 2), (8, 3))]
    nobody = FollowedSequence(begun(9), extended=2)
    for asked in (texts, [texts[0], None], [texts[0], nobody]):
        early = growth_of({7: (0, 2), 8: (1, 2)})
        assert early.take(asked) == []
        assert early.state is OverlapState.DISCARDED
        assert [text.due for text in texts] == [2, 1]
    early = growth_of({7: (0, 2), 8: (1, 2)})
    assert early.take(texts[:1]) == [DueRows(7, 2, (4, 5), True)]
    assert early.confirmed
    assert texts[0].due == 0


def growth_of(places: dict[int, tuple[int, int]]) -> DeviceGrowth:
    return DeviceGrowth.launched(places, 2, lambda: pytest.fail("nobody reads"))


def test_trees_of_a_sequence_that_the_host_saw_otherwise_are_not_taken_but_other_features_stay() -> None:
    """The device has stored the features of the other sequences, which are right."""
    early = growth_of({7: (0, 4), 8: (1, 4)})
    early.discard(7)
    assert early.take([]) == []
    assert early.state is OverlapState.DISCARDED
    covered = [early.covers(FeatureBatch(sequence, 4, (1, 2), 3, 1)) for sequence in (7, 8)]
    assert covered == [False, True]


OFFER = Candidates(np.array([[7]]), np.array([[-0.1]]), np.zeros((1, 1), np.int64), np.ones(1, np.int64))


def begun(sequence: int) -> DraftSequence:
    text = DraftSequence(Opening(sequence, 4, limit=9))
    text.observe(FeatureBatch(sequence, 0, (1, 2, 3, 4), 5, 1))
    return text


def verdict_of(sequence: int) -> DeviceVerification:
    tree = TreeSegment(sequence, 1, 4, (), single(5))
    return DeviceVerification(1, (tree,), torch.zeros(1), torch.zeros(1, 1))


class Ahead(Proposer):
    """Begins early whatever it is asked for."""

    widths, free_pages = (4,), 0
    offer: Candidates | None = None
    barred = 0

    def open(self, sequence: DraftSequence) -> None: ...

    def follows(self, sequence: int) -> bool:
        return True

    def close(self, sequence: int) -> None: ...

    def propose(self, *given: Any) -> Candidates | None:
        return self.offer

    def start_growth(self, verification: DeviceVerification, ids: int, levels: int) -> AsyncGrowth:
        return AsyncGrowth(frozenset(tree.sequence for tree in verification.trees))

    def select(self, growth: Any, texts: Sequence[int], nodes: int, room: int, trust: Any) -> Any:
        return texts, nodes, room

    def bar_forbidden(self, candidates: Candidates, sequences: Sequence[DraftSequence]) -> Candidates:
        self.barred += 1
        return candidates


class Learning(FixedBudget):
    """Tells what it has heard of."""

    adaptive = True

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.heard, self.levels, self.looks = list[float](), 2, False
        self.scored = list[np.ndarray]()

    def plan_levels(self, *given: Any) -> int:
        return self.levels

    def looks_next(self, texts: int) -> bool:
        return self.looks

    def record_step(self, trees: Sequence[TreeOutcome], spent: StepSeconds = UNKNOWN_SECONDS) -> None:
        self.heard.append(spent.wall)

    def score(self, offer: Candidates) -> Any:
        self.scored.append(offer.scores)
        return super().score(offer)


def test_a_step_is_learned_from_while_a_device_is_at_the_next_one() -> None:
    """Where trees grow already; at once where none do, and where it rests."""
    tuner = Learning()
    lane = Speculator(Ahead(), tuner, None, lambda: 0.0)
    text, verdict = begun(1), verdict_of(1)

    def step(wall: float) -> None:
        lane.start_growth(verdict, 9)
        lane.record_step([ROOT_ONLY], StepSeconds(0.0, wall))
        if levels := lane.plan_levels([text]):
            lane.begin(levels)

    step(1.0)
    assert tuner.heard == [1.0], "nothing had grown before"
    step(2.0)
    assert tuner.heard == [1.0]
    step(3.0)
    assert tuner.heard == [1.0, 2.0]
    tuner.looks = True
    step(4.0)
    assert tuner.heard == [1.0, 2.0, 3.0, 4.0], "a plain step is next: nothing was begun"
    tuner.looks, tuner.levels = False, 0
    step(5.0)
    lane.record_step([ROOT_ONLY], StepSeconds(0.0, 6.0))
    assert tuner.heard == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "what was begun is of no use"


def test_the_device_selects_nodes_if_no_other_drafter_had_candidates() -> None:
    """For the step before; and of what grows early alone, as deep as it may go behind what was accepted."""
    own, others = Ahead(), Ahead()
    own.offer = OFFER
    tuner = Learning()
    lane = Speculator(own, tuner, others, lambda: 0.0)
    text, verdict = begun(1), verdict_of(1)

    def step(told: int) -> Any:
        lane.start_growth(verdict, 9)
        chosen = lane.select([(text, told)], 9)
        lane._chosen = None  # nobody launches it
        lane.finish(lane.begin(lane.plan_levels([text])), 9)
        return chosen

    assert step(4) is None, "nothing had grown before"
    assert step(4) == ([1], 5, 2)
    assert step(10) == ([1], 5, 2), "near its end, too: what is of no use does no harm"
    assert step(11) is None, "its root is its last token"
    own.positions = 11
    assert step(10) == ([1], 5, 0), "near the last position"
    own.positions = 99
    others.offer = OFFER
    assert step(4) == ([1], 5, 2)
    assert step(4) is None
    others.offer = None
    assert step(4) is None
    assert step(4) == ([1], 5, 2)
    assert {values.shape for values in tuner.scored} == {(1, 1)}, "nobody foresees what others have"


def test_what_a_device_chose_is_looked_at_no_further_while_a_choice_is_held() -> None:
    """A host has no time for it; nor for what the text suggests."""
    own, others, tuner = Ahead(), Ahead(), Learning()
    own.offer = others.offer = OFFER
    lane = Speculator(own, tuner, others, lambda: 0.0)
    for holding, looked in ((True, 0), (False, 1)):
        tuner.holding = holding
        growth = lane.begin(lane.plan_levels([begun(1)]))
        chosen: Any = SimpleNamespace(take=lambda: ChosenNodes([[[5], [0]]], [[0.5]]))
        ahead = AsyncGrowth(frozenset({1}))
        ahead.apply(OverlapEvent.MATCHED)
        assert lane.finish(replace(growth, chosen=chosen, ahead=ahead), 9)
        assert len(tuner.scored) == own.barred == looked, "nor is a grammar asked"


def test_of_many_trees_that_a_device_selected_the_host_scores_a_few() -> None:
    own, tuner = Ahead(), Learning()
    tuner.holding = False
    one = np.ones((20, 1), np.int64)
    own.offer = Candidates(one, -np.arange(20.0)[:, None], 0 * one, np.array([1]))
    lane = Speculator(own, tuner, Ahead(), lambda: 0.0)
    growth = lane.begin(lane.plan_levels([begun(number) for number in range(20)]))
    chosen: Any = SimpleNamespace(take=lambda: ChosenNodes([[[5], [0]]] * 20, [[0.5]] * 20))
    ahead = AsyncGrowth(frozenset(range(20)))
    ahead.apply(OverlapEvent.MATCHED)
    assert len(lane.finish(replace(growth, chosen=chosen, ahead=ahead), 99)) == 20
    (values,) = tuner.scored
    assert values[:, 0].tolist() == [0, -3, -6, -9, -12, -15, -18]


def test_nodes_that_the_device_selected_before_a_pause_are_discarded_after_it() -> None:
    tuner, own = Learning(), Ahead()
    own.offer, text = OFFER, begun(1)
    lane = Speculator(own, tuner, None, lambda: 0.0)
    lane.begin(lane.plan_levels([text]))
    growth = lane.start_growth(verdict_of(1), 9)
    assert lane.select([(text, 4)], 9)
    tuner.levels = 0
    assert lane.plan_levels([text]) == 0
    assert lane._chosen is None
    assert growth
    assert growth.state is OverlapState.DISCARDED


def test_a_failure_of_device_selection_is_raised_when_the_drafter_reads_the_result() -> None:
    """The failure is not raised in the worker step that requests the growth."""
    chosen = DeviceChoice((1,), 3, (0,), grown=None, trust=np.zeros(2))  # type: ignore[arg-type]
    chosen.choose(*[torch.zeros(1)] * 3, 9)
    with pytest.raises(AttributeError):
        chosen.take()
    assert not chosen.confirmed
