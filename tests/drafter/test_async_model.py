"""Trees that a small model grows before the host has read a verification result are those it grows after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.core.device_verification import DeviceVerification
from specsot.core.frames import FeatureBatch, Open, Opening, TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, children, single
from specsot.drafting import DraftOptions
from specsot.members import Configuration
from specsot.params import Window
from specsot_bench.eagle.generation import StepLoop
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.budget import FixedBudget
from specsot_drafter.core.selection import Candidates, build_trees
from specsot_drafter.core.sequences import DraftSequence, DraftSequences
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.overlap import graph_growth
from specsot_drafter.proposers import lm
from specsot_drafter.proposers.lm import LanguageModelProposer, beam_shape
from specsot_model.cuda_graphs import GraphCapture
from specsot_model.decoder import Decoder
from specsot_worker import sampling
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from tests.conftest import is_full, some
from tests.drafter.ring import opening
from tests.drafter.test_async_growth import GraphSteps, Told, make_steps
from tests.drafter.test_descent import later
from tests.drafter.test_model_graphs import paths
from tests.eager_steps import EagerSteps
from tests.model.test_steps import Fused
from tests.model.tiny import write_model
from tests.models import Shape, write_base
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, PAGE, IDS = 40, 4, 90
CHAIN = DraftOptions("linear", depth=3)
TREE = DraftOptions("tree", depth=2, breadth=2, nodes=6)
# Tokens of each sequence's prompt. The rows of the first one begin on the last slot of a page.
PROMPTS = {1: 11, 2: 5}
# Fraction of a matrix's standard deviation by which the small model of the ring differs from its base model.
NOISE = 0.2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A small model whose layers run as a GPU's. On a CPU kernels are interpreted, so it has one head, and in
    CI one layer. The keys and values of a second layer depend on which rows a row sees: see `pair`.
    """
    folder = tmp_path_factory.mktemp("small")
    heads = 2 if DEVICE == "cuda" else 1
    layers = 2 if DEVICE == "cuda" or is_full() else 1
    write_model(folder, "llama", num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=1)
    return Fused.load(folder, None, torch.float16, DEVICE)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of two trees alone."""
    monkeypatch.setattr(lm, "MODEL_TREES", (2,))
    monkeypatch.setattr(graph_growth, "GRAPH_LEVELS", ())


# Returns the target of each node of a tree on the device, from those of the host.
Changed = Callable[[list[int]], list[int]]


class Run:
    """Sequences that a proposer drafts for, step by step.

    drafter: The proposer.
    growth: The growth that the last step has launched before its result was read.
    sent: The trees that were verified last.
    """

    def __init__(
        self,
        small: Decoder,
        options: DraftOptions,
        leader: Run | None = None,
        ahead: bool = True,
        window: Window | None = None,
    ) -> None:
        """leader: A run whose trees are verified here, too, so that near ties on a GPU change no sequence."""
        capture = GraphCapture() if DEVICE == "cuda" else later
        beam = beam_shape(options)
        self.drafter = LanguageModelProposer(DecoderHead(small, IDS, 64), beam, PAGES, PAGE, capture)
        self.growth: AsyncGrowth | None = None
        self.texts = DraftSequences(None)
        self.trees, self.sent = dict[int, Tree](), dict[int, Tree]()
        self._leader = leader
        self._ahead = ahead
        self._levels = len(beam.widths) + 1
        for sequence, rows in PROMPTS.items():
            self.open(sequence, [(7 * sequence + 13 * at) % IDS for at in range(rows + 1)], window=window)

    def open(self, sequence: int, tokens: list[int], **more: Any) -> None:
        """Open a sequence, whose last token is its root."""
        fork = more.get("fork", (0, 0))[1]
        self.drafter.open(self.texts.open(opening(sequence, fork + len(tokens) - 1, limit=60, **more)))
        self.texts.observe([FeatureBatch(sequence, fork, tuple(tokens[:-1]), tokens[-1], 1)])
        self.trees[sequence] = single(tokens[-1])

    def find(self, sequence: int) -> DraftSequence:
        return there(self.texts.find(sequence))

    def draft(self, *sequences: int) -> list[dict[tuple[int, ...], float]]:
        """Every path of each tree, with its log-probability. The trees are sent with all candidates."""
        known = [self.find(sequence) for sequence in sequences]
        with torch.inference_mode():
            offer: Candidates = there(self.drafter.begin(known, self._levels)())
        roots = [one.tokens[-1] for one in known]
        trees = build_trees(offer, roots, offer.scores > -torch.inf)
        self.trees |= dict(zip(sequences, trees))
        return [paths(offer, row) for row in range(len(known))]

    def verify(self, accepted: dict[int, int], changed: Changed = list) -> None:
        """Accept the first chain of each sequence's tree so far, and write one token of its own after it.

        accepted: Number of accepted nodes of each tree, without its root. Others are not in the frame.
        changed: What the device has found instead of the targets of the host.
        """
        self.sent = self._leader.sent if self._leader else dict(self.trees)
        segments = list[TreeSegment]()
        targets, batches = list[int](), list[FeatureBatch]()
        for sequence, many in accepted.items():
            tree, text = self.sent[sequence], self.find(sequence)
            path = [0]
            for _ in range(many):
                path.append(children(tree.parents)[path[-1]][0])
            below = {tree.tokens[child] for child in children(tree.parents)[path[-1]]}
            bonus = next(one for one in range(17 * sequence % IDS, IDS) if one not in below)
            written = [*(tree.tokens[node] for node in path[1:]), bonus]
            own = [0] * len(tree.tokens)
            for node, token in zip(path, written):
                own[node] = token
            targets += own
            segments.append(TreeSegment(sequence, 2, text.committed, (0,), tree))
            fed = tree.tokens[0], *written[:-1]
            batches.append(FeatureBatch(sequence, text.committed, fed, bonus, 2))
        self.growth = None
        if self._ahead:
            found = torch.tensor(changed(targets), dtype=torch.int32, device=DEVICE)
            verification = DeviceVerification(1, tuple(segments), found, None)
            self.growth = self.drafter.start_growth(verification, IDS, self._levels)
        assert not self.texts.observe(batches)
        self.trees |= {one.sequence: single(there(one.bonus)) for one in batches}

    def close(self) -> None:
        for sequence in list(self.trees):
            self.drafter.close(sequence)
        assert self.drafter.free_pages == PAGES


def same(one: Sequence[dict[tuple[int, ...], float]], other: Sequence[dict[tuple[int, ...], float]]) -> None:
    """On a GPU, which of two near paths is drafted may differ."""
    for left, right in zip(one, other, strict=True):
        assert DEVICE == "cuda" or list(left) == list(right)
        assert max(left.values()) == pytest.approx(max(right.values()), abs=0.02)
        for path in left.keys() & right.keys():
            assert left[path] == pytest.approx(right[path], abs=0.02)


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_model_grows_asynchronously_what_it_grows_when_the_host_knows(
    small: Decoder, options: DraftOptions
) -> None:
    """Whatever was accepted: nothing, something, or whole chains, over several steps."""
    late = Run(small, options, ahead=False)
    ahead = Run(small, options, late)
    same(ahead.draft(1, 2), late.draft(1, 2))
    depth = 3 if options is CHAIN else 2
    for accepted in ({1: 2, 2: 0}, {1: depth, 2: depth}):
        for run in (late, ahead):
            run.verify(accepted)
        assert ahead.growth
        same(ahead.draft(1, 2), late.draft(1, 2))
        assert ahead.growth.confirmed
    late.close()
    ahead.close()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_growth_from_targets_that_the_host_did_not_find_is_repeated(small: Decoder, told: bool) -> None:
    """The rows of wrong tokens are computed again, also for the step after that."""
    late = Run(small, CHAIN, ahead=False)
    ahead = Run(small, CHAIN, late)
    for run in (late, ahead):
        run.draft(1, 2)
    late.verify({1: 1, 2: 2})
    ahead.verify({1: 1, 2: 2}, lambda targets: [targets[0] ^ 1, *targets[1:]])
    growth = there(ahead.growth)
    if told:
        growth.discard(1)
    same(ahead.draft(1, 2), late.draft(1, 2))
    assert growth.state is OverlapState.DISCARDED
    for run in (late, ahead):
        run.verify({2: 1, 1: 2})
    same(ahead.draft(1, 2), late.draft(1, 2))
    assert there(ahead.growth).confirmed


def test_a_growth_is_used_for_some_of_its_sequences_and_the_others_are_fed_later(small: Decoder) -> None:
    """The second sequence requests no tree, then closes; a fork of the first joins, which shares its rows."""
    late = Run(small, CHAIN, ahead=False)
    ahead = Run(small, CHAIN, late)
    for run in (late, ahead):
        run.draft(1, 2)
        run.verify({1: 2, 2: 1})
    same(ahead.draft(1), late.draft(1))
    assert there(ahead.growth).confirmed
    for run in (late, ahead):
        run.verify({1: 1, 2: 0})
    assert ahead.growth, "the few tokens of the second sequence are fed before"
    same(ahead.draft(2, 1), late.draft(2, 1))
    assert ahead.growth.confirmed
    for run in (late, ahead):
        run.verify({1: 3, 2: 1})
        run.drafter.close(2)
        run.texts.close(2)
        run.open(3, [5, 6, 7], fork=(1, run.find(1).committed - 1))
    same(ahead.draft(1, 3), late.draft(1, 3))
    assert there(ahead.growth).state is OverlapState.DISCARDED, "the fork has no tree in it"
    for run in (late, ahead):
        run.verify({1: 0, 3: 2})
    same(ahead.draft(3, 1), late.draft(3, 1))
    assert there(ahead.growth).confirmed


def test_prompts_are_fed_before_trees_grow_asynchronously(
    small: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones at once, those of forks too; after long ones, trees grow so in the next step."""
    late = Run(small, CHAIN, ahead=False)
    ahead = Run(small, CHAIN, late)
    for run in (late, ahead):
        run.verify({1: 0, 2: 0})
    assert ahead.growth
    same(ahead.draft(1, 2), late.draft(1, 2))
    assert ahead.growth.confirmed
    for run in (late, ahead):
        run.open(3, [5, 6, 7], fork=(1, run.find(1).committed - 1))
        run.verify({1: 1, 3: 0})
    assert ahead.growth
    same(ahead.draft(1, 3), late.draft(1, 3))
    assert ahead.growth.confirmed
    monkeypatch.setattr(lm, "PREFILL_ROWS", 3)
    late = Run(small, CHAIN, ahead=False)
    ahead = Run(small, CHAIN, late)
    for run in (late, ahead):
        run.verify({1: 0, 2: 0})
    assert ahead.growth is None
    same(ahead.draft(1, 2), late.draft(1, 2))
    for run in (late, ahead):
        run.verify({1: 1, 2: 0})
    assert ahead.growth
    same(ahead.draft(1, 2), late.draft(1, 2))
    assert ahead.growth.confirmed


def test_what_cannot_grow_asynchronously(small: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, too many trees, too many tokens that are not fed, no free page, and unknown sequences."""
    run = Run(small, CHAIN, window=Window(sinks=2, recent=16))
    run.draft(1, 2)
    run.verify({1: 1, 2: 1})
    assert run.growth is None
    run = Run(small, CHAIN)
    table = run.drafter._pages.table
    table.open(9)
    # So few pages are free that none is reserved before it is needed.
    table.reserve(9, PAGE * (table.free - 12))
    run.open(3, [5, 6, 7])
    run.draft(1, 2, 3)
    run.verify({1: 1, 2: 1, 3: 1})
    assert run.growth is None, "no graph has three trees"
    monkeypatch.setattr(lm, "PREFILL_ROWS", 3)
    run.verify({1: 0, 2: 0})
    assert run.growth is None, "four tokens are due"
    run.draft(1, 2)
    table.open(10)
    table.reserve(10, PAGE * table.free)
    run.verify({1: 0, 2: 0})
    assert run.growth is None, "no page is free"
    run.drafter.close(9)
    run.verify({1: 0})
    assert run.growth
    run.drafter.close(1)
    run.verify({1: 0})
    assert run.growth is None, "it is closed"


# Tokens that each sequence of the ring may write. The last one ends while others continue.
LIMITS = {1: 10, 2: 8, 3: 5}
# Step before which a sequence comes.
COMES = {3: 2}


def write(
    folder: Path, ahead: bool, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[int, tuple[int, ...]]], list[dict[int, Tree]], list[bool], EagerSteps | GraphSteps]:
    """What a ring of one stage writes in each step, with which trees, and whether the device grew them from
    its own result.

    ahead: Whether trees may grow before the host has read the result.
    selects: Whether the device may select their nodes.
    """
    confirmed = list[bool]()

    class Proposer(LanguageModelProposer):
        started: AsyncGrowth | None = None

        def start_growth(self, *given: Any) -> AsyncGrowth | None:
            self.started = super().start_growth(*given) if ahead else None
            return self.started

        def begin(self, *given: Any) -> Any:
            offer = super().begin(*given)
            confirmed.append(self.started is not None and self.started.confirmed)
            self.started = None
            return offer

    monkeypatch.setattr(sampling, "choose_tokens", Told(False))
    monkeypatch.setattr(lm, "MODEL_TREES", (4,))
    decoder = Decoder.load(folder / "base", None, torch.float16, DEVICE)
    head = DecoderHead(Fused.load(folder / "small", None, torch.float16, DEVICE), 200, 512)
    beam = beam_shape(CHAIN)
    capture = GraphCapture() if DEVICE == "cuda" else later
    proposer = Proposer(head, beam, PAGES, 16, capture)
    shape = beam.tree_shape
    configuration = Configuration(1, "d", (), PAGES, 16, shape.slots, 64, shape=shape)
    engine = DraftEngine({"model": (proposer, FixedBudget(shape))}, configuration)
    budget = FrameBudget(64, 1, shape.slots)
    sequencer = Sequencer(1, budget, PageTable(PAGES, 16), DraftTimeout(0.0, True))
    stage = DecoderStage(decoder, PAGES, 16)
    steps = make_steps(decoder, stage._kv, {}, selects)
    stage.run_by(steps)
    loop = StepLoop(stage, Verifier(decoder.logits, lambda _: None, None, stage), sequencer, engine)
    written, trees = list[dict[int, tuple[int, ...]]](), list[dict[int, Tree]]()
    left = dict(LIMITS)
    while any(left.values()):
        for sequence in (one for one in LIMITS if COMES.get(one, 0) == len(written)):
            prompt = tuple(range(7 * sequence, 7 * sequence + 5))
            opening = Opening(sequence, 5, drafted=True, limit=LIMITS[sequence])
            sequencer.apply_order(Open(opening, prompt, 1000))
        step = loop.turn()
        written.append({one.sequence: one.tokens for one in step.result.outcomes})
        for one in step.result.outcomes:
            left[one.sequence] -= len(one.tokens)
        trees.append({one: tree for one, tree in loop.trees.items() if left[one] > shape.depth + 2})
    return written, trees, confirmed, steps


def texts(written: list[dict[int, tuple[int, ...]]], sequence: int) -> tuple[int, ...]:
    """All that a sequence wrote."""
    return sum((step.get(sequence, ()) for step in written), ())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and a small model whose weights are near the base model's, so that some of its drafts are
    accepted. Both have two layers.
    """
    folder = tmp_path_factory.mktemp("pair")
    few = Shape(layers=2, heads=2 if DEVICE == "cuda" else 1, kv_heads=1)
    write_base(folder / "base", few)
    small = write_base(folder / "small", few) / "model.safetensors"
    seeded = torch.Generator().manual_seed(1)
    tensors = load_file(small)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=seeded)
        tensors[name] = tensor + NOISE * tensor.std() * noise.to(tensor.dtype)
    save_file(tensors, small)
    return folder


@pytest.mark.parametrize(
    "selects", some([False, True], 1), ids=["chosen by the host", "chosen by the device"]
)
def test_a_ring_writes_the_same_whichever_way_its_drafts_grow(
    pair: Path, monkeypatch: pytest.MonkeyPatch, selects: bool
) -> None:
    """Some drafts are accepted, others are not; sequences come and end meanwhile. One that comes has its
    first tree a step later, so that the other trees do not wait for its prompt.
    """
    written, trees, never, _ = write(pair, False, False, monkeypatch)
    lengths = {len(tokens) for step in written[1:] for tokens in step.values()}
    assert {1, 2} <= lengths
    assert not any(never)
    found, found_trees, confirmed, steps = write(pair, True, selects, monkeypatch)
    assert [texts(found, one) for one in LIMITS] == [texts(written, one) for one in LIMITS]
    others, wanted = (
        [{one: tree for one, tree in step.items() if one not in COMES} for step in steps_of_trees]
        for steps_of_trees in (found_trees, trees)
    )
    assert DEVICE == "cuda" or others == wanted
    assert confirmed == [False] + [True] * (len(confirmed) - 1), "all but those after prompts"
    assert (steps.unread > 2) == selects


def test_the_device_selects_no_nodes_of_pruned_trees(small: Decoder) -> None:
    """It would select barred candidates."""
    pruned = DraftOptions("pruned", depth=2, breadth=2, nodes=6, threshold=0.1)
    chosen = list[bool]()
    for options in (TREE, pruned):
        run = Run(small, options)
        run.draft(1, 2)
        run.verify({1: 0, 2: 0})
        trust = torch.zeros(2).numpy()
        chosen.append(run.drafter.select(there(run.growth), [1, 2], 4, 2, trust) is not None)
    assert chosen == [True, False]
