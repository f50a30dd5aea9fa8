"""A step that is begun before its frame comes, plain or with drafts: the same text and pages, whatever comes
instead of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specsot.core.frames import Close, Fork, Frame, Lease, Open, Opening, Order, PromptChunk, TreeSegment
from specsot.core.overlap import OverlapEvent
from specsot.core.pages import PageTable
from specsot.core.run_ahead import MAX_PASSES
from specsot.core.tree import Tree, accept, chain, shape_of
from specsot.errors import ModelError
from specsot.grammar.state import Grammar
from specsot.members import Configuration, TreeShape
from specsot.params import Sampling, Window
from specsot_bench.eagle.generation import StepLoop
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.budget import FixedBudget
from specsot_drafter.core.selection import Candidates, ChosenNodes, best_each, build_trees, depth_masses
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.engine import DraftEngine
from specsot_drafter.proposers import Proposer
from specsot_model.captured_tokens import CapturedTokens
from specsot_model.core.kv_plan import plan_frame
from specsot_model.decoder import Decoder
from specsot_worker import sampling, verifier
from specsot_worker import stage as stage_module
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.overlap.next_step import NextStep
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from tests.conftest import some
from tests.eager_steps import EagerSteps
from tests.models import Shape, write_base

PAGES, PAGE, LEASE = 48, 4, 1000
FEW_PAGES = 24  # somebody waits for them
STOP = 7
LENGTHS = {1: 30, 2: 40, 3: 21, 4: 9, 5: 12}  # tokens that each may write
WINDOW, WIDE = Window(2, 16), Window(2, 30)
FLAT = Shape(layers=2)  # Steps are what is tested: what layers do is the same in each.


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = write_base(tmp_path_factory.mktemp("base"), FLAT)
    return Decoder.load(base, None, torch.float32, "cpu")


@pytest.fixture(scope="module")
def wanted_of(decoder: Decoder) -> Callable[[Window | None], dict[int, list[int]]]:
    """Returns what single steps without drafts write, of sequences that all begin at once: once for each
    window.
    """

    @cache
    def wanted(window: Window | None) -> dict[int, list[int]]:
        at_once = [order for due in orders(window).values() for order in due if isinstance(order, Open)]
        return write(decoder, ahead=False, due={0: at_once})[0]

    return wanted


def opened(
    sequence: int, fork: Fork | None = None, drafted: bool = False, window: Window | None = None, **more: Any
) -> Open:
    """Nobody forks a text that writes behind a window."""
    fork = None if window else fork
    own = tuple(range(sequence, sequence + 5))
    prompt = len(own) + (fork.length if fork else 0)
    more |= {"drafted": drafted, "limit": LENGTHS[sequence], "window": window}
    opening = Opening(sequence, prompt, fork, **more)
    return Open(opening, own, LEASE)


def orders(window: Window | None = None) -> dict[int, list[Order]]:
    """By step: some begin together, others come and go while they write; one forks the prompt of another."""
    warm, make = Sampling(temperature=0.9), partial(opened, window=window)
    return {
        0: [make(1), make(2, sampling=warm, seed=5), make(3, sampling=warm, stop_ids=(STOP,))],
        8: [make(4, Fork(1, 5))],
        20: [Close(2)],
        26: [make(5, sampling=warm, ordinal=1)],
    }


def steps_of(loop: StepLoop, due: dict[int, list[Order]]) -> Iterator[Any]:
    for step in range(200):
        for order in due.pop(step, []):
            loop.sequencer.apply_order(order)
        try:
            yield loop.turn()
        except ModelError:
            if not due:
                return


Orders = dict[int, list[Order]]


def write(
    decoder: Decoder,
    ahead: bool,
    due: Orders | None = None,
    engine: DraftEngine | None = None,
    unread: bool = False,
    pages: int = PAGES,
    rows: int = 64,
    passes: bool = False,
    find_grammar: Callable[[Opening], Grammar | None] = lambda _: None,
    captured: CapturedTokens | None = None,
) -> tuple[dict[int, list[int]], DecoderStage, EagerSteps, int]:
    """What each sequence writes, and how many steps that took. unread: features are told of, too."""
    stage = DecoderStage(decoder, pages, PAGE, "packed")
    if unread:
        stage.tap(1, torch.ones(4, decoder.config.hidden))
    steps = EagerSteps(decoder, stage._kv, stage._taps, unread)
    steps.accepts_device_tokens = passes
    if ahead:
        stage.run_by(steps)
    slots = SHAPE.slots if engine else MAX_PASSES if passes else 1
    budget, table = FrameBudget(rows, 1, slots), PageTable(pages, PAGE)
    waits, vocabulary = DraftTimeout(0.0, present=engine is not None), decoder.config.vocab
    verifier = Verifier(
        decoder.logits, find_grammar, None, stage if ahead else None, captured_tokens=captured
    )
    sequencer = Sequencer(
        1, budget, table, waits, vocabulary=vocabulary, runs_ahead=lambda: verifier.runs_ahead
    )
    written, number = dict[int, list[int]](), 0
    for step in steps_of(StepLoop(stage, verifier, sequencer, engine), orders() if due is None else due):
        number += any(step.frame.segments)
        for outcome in step.result.outcomes:
            written.setdefault(outcome.sequence, []).extend(outcome.tokens)
    return written, stage, steps, number


@pytest.mark.parametrize("window", [None, WINDOW])
def test_law_1_steps_that_are_launched_early_generate_the_same(
    decoder: Decoder, window: Window | None
) -> None:
    wanted, plain, _, _ = write(decoder, False, orders(window))
    found, stage, steps, number = write(decoder, True, orders(window))
    assert {sequence: len(tokens) for sequence, tokens in wanted.items()}.keys() == LENGTHS.keys()
    assert found == wanted
    assert stage.table.free == plain.table.free == PAGES, "nothing is kept for steps that never came"
    assert stage.table.sequences == plain.table.sequences == frozenset()
    assert steps.launched > number, "some were begun for nothing"


def begun_of(monkeypatch: pytest.MonkeyPatch, way: str) -> list[bool]:
    """Return a list that gets the answer of every later call of this method: whether it launched a step."""
    begun, ask = list[bool](), getattr(NextStep, way)
    monkeypatch.setattr(NextStep, way, lambda *given: begun.append(ask(*given)) or begun[-1])
    return begun


def test_plain_steps_go_on_at_once_where_some_end(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their length, or by a stop token. Only the steps of the prompts and of the first trees are not."""
    wanted, *_ = write(decoder, ahead=False, due={0: [opened(sequence) for sequence in LENGTHS]})
    stop = wanted[2][19]
    stopped = wanted[2].index(stop) + 1
    at_once: Orders = {0: [opened(one, stop_ids=(stop,) if one == 2 else ()) for one in LENGTHS]}
    begun = begun_of(monkeypatch, "launch")
    found, stage, steps, number = write(decoder, True, at_once)
    assert found == wanted | {2: wanted[2][:stopped]}
    assert steps.launched == number == LENGTHS[1], "none for nothing"
    assert sum(begun) == number - 2
    assert stage.table.free == PAGES


@pytest.mark.parametrize(("new", "family"), [(5, None), (4, None), (5, 0)], ids=["last", "between", "first"])
def test_undrafted_steps_after_prompts_continue_at_once_in_order(
    decoder: Decoder, new: int, family: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun for whom the next frame has elsewhere."""
    others = [opened(one) for one in LENGTHS if one not in (new, 4)] + [opened(5)] * (new != 5)
    joins: Orders = {0: others, 5: [opened(new, family=family)]}
    wanted, *_ = write(decoder, ahead=False, due=dict(joins))
    begun = begun_of(monkeypatch, "launch")
    found, _, steps, number = write(decoder, True, joins)
    assert found == wanted
    last = new == 5 and family is None
    assert steps.launched == number + 1, "one before the text joins, of whom nobody knew yet"
    assert sum(begun) == number - 2 - (not last)


def test_no_step_is_launched_early_if_a_prompt_waits_for_rows(decoder: Decoder) -> None:
    """Three trees and the fourth text's prompt are a whole frame; the fifth one's comes with the next."""
    at_once: Orders = {0: [opened(sequence) for sequence in LENGTHS]}
    wanted, *_ = write(decoder, ahead=False, due=at_once)
    found, _, steps, number = write(decoder, True, {0: [opened(one) for one in LENGTHS]}, rows=8)
    assert found == wanted
    assert steps.launched == number, "none for nothing"


SHAPE = TreeShape(3, 2, 6, fixed=True)


def test_trees_of_a_discarded_step_and_prompts_run_in_two_passes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they have more tokens than a graph, and might need more memory than one pass may."""
    tree = TreeSegment(1, 1, 5, (), Tree((7, 8, 9), (0, 0, 1)))
    frames = (
        Frame(1, 1, (Opening(1, 5, limit=99),), (PromptChunk(1, 0, (1, 2, 3, 4, 5), True),)),
        Frame(1, 2, (Opening(2, 6, limit=99),), (tree, PromptChunk(2, 0, (3, 4, 5, 6, 7, 8), True)), (1,)),
    )
    monkeypatch.setattr(stage_module, "BUCKETS", (6,))
    outputs, launched = list[torch.Tensor](), list[int]()
    for apart in (False, True):
        stage = DecoderStage(decoder, PAGES, PAGE, "packed")
        steps = EagerSteps(decoder, stage._kv, stage._taps)
        if apart:
            stage.run_by(steps)
        for frame in frames:
            hidden = stage.run(frame).hidden
        assert isinstance(hidden, torch.Tensor)
        outputs.append(hidden)
        launched.append(steps.launched)
        assert stage.table.sequences == {2}
    torch.testing.assert_close(*outputs)
    assert launched == [0, 3]


class Erring(Proposer):
    """Knows what each will write, and errs: a right token of three stands second, one of six nowhere.

    Trees have another shape each time; chains always the same.
    """

    widths, free_pages = (2, 2), 9

    def __init__(self, texts: dict[int, list[int]], chains: bool = False) -> None:
        self._texts, self._rng, self._width = texts, random.Random(3), 1 if chains else 2
        self._followed = set[int]()
        self.broken = False

    def open(self, sequence: DraftSequence) -> None:
        self._followed.add(sequence.id)

    def follows(self, sequence: int) -> bool:
        return sequence in self._followed

    def close(self, sequence: int) -> None:
        self._followed.discard(sequence)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: Any = None
    ) -> Candidates:
        assert not self.broken, "a bug of the drafter's"
        return self._grown([(text.id, len(text.tokens) - text.opening.prompt) for text in sequences], levels)

    def _grown(self, written: Sequence[tuple[int, int]], levels: int) -> Candidates:
        """Of texts that have so many tokens of their own."""
        rng, width = self._rng, self._width
        tokens, parents = np.zeros((2, len(written), levels * width), np.int64)
        for row, (text, many) in enumerate(written):
            right, parent = self._texts[text][many:], 0
            for level in range(levels):
                first = level * width
                places = slice(first, first + width)
                tokens[row, places], parents[row, places] = [rng.randrange(150) for _ in range(width)], parent
                chosen = first + (rng.random() < 1 / 3) % width
                if level < len(right) and rng.random() > 1 / 6:
                    tokens[row, chosen] = right[level]
                parent = chosen + 1
        depths = np.repeat(np.arange(1, levels + 1), width)
        scores = -0.1 * depths - 0.01 * np.tile(np.arange(width), levels)
        return Candidates(tokens, np.tile(scores, (len(written), 1)), parents, depths)


class Dozing(FixedBudget):
    """Rests for some steps at any of them."""

    adaptive = True

    def __init__(self, seed: int) -> None:
        super().__init__(SHAPE)
        self._odds = random.Random(seed)

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self.paused_trees = live * self._odds.randint(1, 3) if self._odds.random() < 0.3 else 0
        return 0 if self.paused_trees else most


def engine_of(proposer: Proposer, budget: FixedBudget | None = None) -> DraftEngine:
    told = Configuration(1, "d", (), PAGES, PAGE, SHAPE.slots, 64, shape=SHAPE)
    return DraftEngine({"eagle": (proposer, budget or FixedBudget(SHAPE))}, told)


def random_orders(seed: int, window: Window | None, drafted: bool = True) -> Orders:
    """They come, go and pause at any step; one forks the prompt of another."""
    rng, warm = random.Random(seed), Sampling(temperature=0.9)
    make = partial(opened, window=window, drafted=drafted)
    due: Orders = {step: [] for step in range(60)}
    fork, stop = Fork(1, 5), (STOP,)
    for order, latest in (
        (make(1), 0),
        (make(2, sampling=warm, seed=5), 3),
        (make(3, sampling=warm, stop_ids=stop), 6),
        (make(4, fork), 6),
        (make(5, sampling=warm, ordinal=1), 12),
    ):
        due[rng.randint(0, latest)].append(replace(order, lease=rng.choice((12, 14, LEASE))))
    due[rng.randint(4, 9)].append(Close(2))
    for sequence in LENGTHS:
        due[rng.randint(13, 20)].append(Lease(sequence, LEASE))
    return due


def test_others_go_on_at_once_where_one_ends(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first ones, of prompts and behind those, are not begun early."""
    at_once: Orders = {0: [opened(sequence) for sequence in LENGTHS]}
    wanted, *_ = write(decoder, ahead=False, due=at_once)
    begun = begun_of(monkeypatch, "launch_drafts")
    drafted: Orders = {0: [opened(sequence, drafted=True) for sequence in LENGTHS]}
    found, _, steps, number = write(decoder, True, drafted, engine_of(Erring(wanted)))
    assert found == wanted
    assert steps.launched == number, "none for nothing"
    assert sum(begun) == number - 2


def seeds_of(*windows: Window) -> list[Any]:
    """Two seeds without a window, of which one has few pages, and one for each window; two more are left to
    `make test-all`.
    """
    return some([(0, None), (1, None), (2, None), (3, None), (4, windows[0]), (5, windows[1])], 0, 1, 4, 5)


@pytest.mark.parametrize(("seed", "window"), seeds_of(WINDOW, WIDE))
def test_law_1_undrafted_steps_launched_early_generate_the_same_as_sequences_come_and_go(
    decoder: Decoder, seed: int, window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, *_ = write(decoder, ahead=False, due=random_orders(seed, window, drafted=False))
    begun = begun_of(monkeypatch, "launch")
    pages = PAGES if seed % 2 else FEW_PAGES
    found, stage, _, number = write(decoder, True, random_orders(seed, window, drafted=False), pages=pages)
    assert found == wanted
    assert stage.table.free == pages, "nothing is kept for steps that never came"
    assert sum(begun) > number / 2


@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize(("seed", "window"), seeds_of(WINDOW, WIDE))
def test_law_1_drafted_steps_that_are_launched_early_generate_the_same(
    decoder: Decoder,
    wanted_of: Callable[[Window | None], dict[int, list[int]]],
    chains: bool,
    seed: int,
    window: Window | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = wanted_of(window)
    begun = begun_of(monkeypatch, "launch_drafts")
    engine = engine_of(Erring(wanted, chains))
    found, stage, steps, number = write(decoder, True, random_orders(seed, window), engine)
    assert {sequence: found[sequence] for sequence in (1, 3, 4, 5)} == {n: wanted[n] for n in (1, 3, 4, 5)}
    assert found[2] == wanted[2][: len(found[2])]
    assert stage.table.free == PAGES, "nothing is kept for steps that never came"
    assert sum(begun) > number / 5
    assert steps.launched > number, "some were begun for nothing"


@dataclass
class Chosen:
    """See `ChosenTrees`: what a device has chosen of these candidates."""

    sequences: tuple[int, ...]
    nodes: int
    written: list[int]  # tokens of each text by then
    candidates: Candidates
    confirmed: bool = False
    made: bool = False
    broken: bool = False

    @property
    def flags(self) -> Any:
        return best_each(self.candidates.scores, self.nodes - 1)

    def choose(self, tokens: Any, positions: Any, bits: Any, vocabulary: int) -> None:
        self.made, nodes = True, self.nodes
        if self.broken:
            return
        roots = tokens[::nodes].tolist()
        for row, tree in enumerate(build_trees(self.candidates, roots, self.flags)):
            here, shape = slice(row * nodes, (row + 1) * nodes), shape_of(tree.parents)
            tokens[here] = torch.tensor([min(token, vocabulary - 1) for token in tree.tokens])
            positions[here] = positions[row * nodes] + torch.tensor(shape.depths)
            bits[here, 0] = torch.tensor(shape.ancestry)

    def take(self) -> Any:
        assert not self.broken
        self.confirmed = self.made
        if not self.made:
            return None
        flags = self.flags
        trees = build_trees(self.candidates, [0] * len(flags), flags)
        nodes = [[list(tree.tokens[1:]), list(tree.parents[1:])] for tree in trees]
        return ChosenNodes(nodes, depth_masses(self.candidates, flags).tolist())


class Choosing(Erring):
    """Its device chooses trees; but at times nothing is chosen, or others had grown, or none of a text."""

    def __init__(self, texts: dict[int, list[int]], seed: int) -> None:
        super().__init__(texts)
        self._odds, self._prompts, self._written = random.Random(seed), dict[int, int](), dict[int, int]()
        self._chosen: Chosen | None = None
        self._ahead: AsyncGrowth | None = None
        self.intact = -1  # choices until one fails

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        self._prompts[sequence.id] = sequence.opening.prompt

    def start_growth(self, verification: Any, ids: int, levels: int) -> AsyncGrowth | None:
        targets, self._written, self._chosen = verification.targets.tolist(), {}, None
        for one in verification.trees:
            own, targets = targets[: len(one.tree)], targets[len(one.tree) :]
            more = len(accept(one.tree, own)) + 1 - self._prompts[one.sequence]
            self._written[one.sequence] = one.committed + more
        self._ahead = AsyncGrowth(frozenset(self._written)) if self._odds.random() < 0.95 else None
        return self._ahead

    def select(self, growth: Any, texts: Sequence[int], nodes: int, room: int, trust: Any) -> Any:
        levels, odds = len(self.widths) + 1, self._odds
        if room < levels or not self._written.keys() >= set(texts) or odds.random() < 0.05:
            return None
        written, nodes = [self._written[text] for text in texts], odds.choice((2, 3, nodes, nodes))
        candidates = self._grown([*zip(texts, written)], levels)
        self._chosen = Chosen(tuple(texts), nodes, written, candidates, broken=self.intact == 0)
        self.intact -= 1
        return self._chosen

    def begin(self, sequences: Sequence[DraftSequence], levels: int, keep_growing: Any = None) -> Any:
        chosen, self._chosen, odd = self._chosen, None, self._odds.random()
        ahead, self._ahead = self._ahead, None
        if chosen is None or chosen.sequences != tuple(text.id for text in sequences) or odd < 0.05:
            if ahead:
                ahead.discard()
            return super().begin(sequences, levels, keep_growing)
        assert chosen.written == [len(text.tokens) - text.opening.prompt for text in sequences]
        assert ahead
        ahead.apply(OverlapEvent.MATCHED)

        def offer() -> Candidates | None:
            if odd <= 0.1:
                ahead.discard()
            return chosen.candidates if ahead.confirmed else self.propose(sequences, levels)

        return offer


def tells_early(logits: Any, requests: Any, meanwhile: Any = None) -> list[int | None]:
    """As a GPU's kernel: of what was chosen before that is read."""
    tokens = CHOOSE(logits, requests)
    if meanwhile:
        meanwhile(torch.tensor(tokens, dtype=torch.int32))
    return tokens


CHOOSE = sampling.choose_tokens


@pytest.mark.parametrize("dozes", [False, True])
@pytest.mark.parametrize(("seed", "window"), seeds_of(WIDE, WIDE))
def test_law_1_steps_with_trees_that_no_host_had_read_write_the_same(
    decoder: Decoder,
    wanted_of: Callable[[Window | None], dict[int, list[int]]],
    seed: int,
    window: Window | None,
    dozes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = wanted_of(window)
    monkeypatch.setattr(sampling, "choose_tokens", tells_early)
    monkeypatch.setattr(verifier, "find_targets", partial(sampling.find_targets, at_once=True))
    engine = engine_of(Choosing(wanted, seed), Dozing(seed) if dozes else None)
    pages = PAGES if seed % 2 else FEW_PAGES
    found, stage, steps, number = write(decoder, True, random_orders(seed, window), engine, True, pages)
    assert {sequence: found[sequence] for sequence in (1, 3, 4, 5)} == {n: wanted[n] for n in (1, 3, 4, 5)}
    assert found[2] == wanted[2][: len(found[2])]
    assert stage.table.free == pages, "nothing is kept for steps that never came"
    assert steps.unread > number / (20 if dozes else 10)
    assert steps.launched > number, "some were launched for nothing"


def test_only_the_first_step_of_a_pause_is_launched_late(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No drafts follow a paused step, nor the step that resumes the drafter."""
    wanted, *_ = write(decoder, ahead=False, due={0: [opened(2)]})
    begun, frames, run = begun_of(monkeypatch, "launch"), list[Frame](), DecoderStage.run
    monkeypatch.setattr(DecoderStage, "run", lambda self, one: frames.append(one) or run(self, one))
    engine = engine_of(Erring(wanted), Dozing(1))
    found, *_ = write(decoder, True, {0: [opened(2, drafted=True)]}, engine)
    assert found == wanted
    unasked = [one for one in frames[1:] if one.paused or one.catching_up]
    assert len(unasked) > 5
    assert begun == [True] * len(unasked)


def test_what_no_graph_has_room_for_is_arranged_once() -> None:
    table, filled = PageTable(4, PAGE), list[Any]()
    steps: Any = SimpleNamespace(fill=filled.append)
    ahead = NextStep(table, None, steps, 100)  # type: ignore[arg-type]
    plan_frame(table, Frame(1, 1, (Opening(1, 2, limit=9),), (PromptChunk(1, 0, (5, 6), True),)))
    tree = chain((7, 8))
    for draft_round in (1, 2):
        ahead.predict(
            Frame(1, 1 + draft_round, segments=(TreeSegment(1, draft_round, 1 + draft_round, (0,), tree),))
        )
    assert ahead.prepare([TreeSegment(1, 3, 3, (0,), tree)], [tree])
    assert not ahead.launch_drafts([tree])
    assert len(filled) == 1
