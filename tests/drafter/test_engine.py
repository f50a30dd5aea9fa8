"""The draft engine over a random head: the same trees whatever the chunks, forks and batches.

Features are random rows, the tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from specsot.core.frames import Draft, FeatureBatch, Features, Opening
from specsot.core.tree import Tree, depths, single
from specsot.errors import WireError
from specsot.members import Curve, TreeShape
from specsot_drafter.core.acceptance import PRIOR_ACCEPTANCE, AcceptanceRates
from specsot_drafter.core.budget import ROOT_ONLY, TreeOutcome
from specsot_drafter.core.control import DraftPolicy
from specsot_drafter.core.selection import best_each, build_trees
from specsot_drafter.core.step_costs import LOOK_STEPS
from specsot_drafter.engine import DraftEngine
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import make_engine
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_model.attention import RowSpan, plan_attention
from tests.drafter.curves import SLOW_HEAD, STEEP
from tests.drafter.ring import configuration, drafts_of, opening
from tests.models import Shape, write_base, write_head

SHAPE = TreeShape(depth=3, top_k=3, nodes=12, fixed=True)
PAGE_ROWS = 16
LONG = 60


@dataclass(frozen=True)
class Text:
    """Tokens 0 .. n with a feature for each but the last."""

    tokens: tuple[int, ...]
    rows: torch.Tensor

    def feature_batch(
        self, sequence: int, start: int, stop: int, draft_round: int | None = None, final: bool = False
    ) -> Features:
        """Positions start .. stop - 1 as one batch; the token behind them is told when `final`."""
        bonus = self.tokens[stop] if final else None
        feature_batch = FeatureBatch(sequence, start, self.tokens[start:stop], bonus, draft_round)
        return Features(1, 0, (), (feature_batch,), (), self.rows[start:stop], stop - start, 0.0)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    folder = tmp_path_factory.mktemp("models")
    base, drafter = write_base(folder / "base", Shape(layers=7, positions=128)), write_head(folder / "head")
    return load_head(drafter, base, torch.float32, "cpu")


@pytest.fixture(scope="module")
def text(head: DraftHead) -> Text:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 200, (LONG + 1,), generator=draw)
    return Text(tuple(tokens.tolist()), torch.randn(LONG, head.width, generator=draw))


@pytest.fixture
def engine(head: DraftHead) -> DraftEngine:
    return make(head)


def make(head: DraftHead, pages: int = 40, shape: TreeShape = SHAPE, curve: Curve = ()) -> DraftEngine:
    return make_engine(head, configuration(shape, pages, PAGE_ROWS, curve=curve), curve=SLOW_HEAD)


def tuner_of(engine: DraftEngine) -> DraftPolicy:
    rule = engine.speculators["eagle"].budget
    assert isinstance(rule, DraftPolicy)
    return rule


def open_with(engine: DraftEngine, *openings: Opening) -> None:
    engine.observe(Features(1, 0, openings))


def expected(head: DraftHead, text: Text, n: int) -> Tree:
    """Computed from scratch: the head over all n rows at once, then one growth."""
    with torch.inference_mode():
        kv = head.make_kv(1, 128)
        tokens, rows = torch.tensor(text.tokens[1 : n + 1]), torch.arange(n)
        plan = plan_attention([RowSpan(n, 0, n, (0,))], 128, head.group, "packed", head.dtype, head.device)
        outputs = head.forward(tokens, text.rows[:n], HeadRows(rows, rows, plan, kv))
        offer = TreeGrowth(head, kv, [TreeRoom(n, (0,), range(n, 128), n)], SHAPE.top_k).run(
            outputs[-1:], SHAPE.depth + 1
        )
        return build_trees(offer, [text.tokens[n]], best_each(offer.scores, SHAPE.nodes - 1))[0]


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_the_same_tree_whatever_the_chunks(
    head: DraftHead, text: Text, engine: DraftEngine, chunk: int
) -> None:
    open_with(engine, opening(1, 40))
    for start in range(0, 40, chunk):
        stop = min(start + chunk, 40)
        engine.observe(text.feature_batch(1, start, stop, 1 if stop == 40 else None, final=stop == 40))
        if stop < 40:
            assert drafts_of(engine) == ()
    assert drafts_of(engine) == (Draft(1, 1, expected(head, text, 40)),)


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_the_same_tree_whatever_the_fork(
    head: DraftHead, text: Text, engine: DraftEngine, length: int, computed: bool
) -> None:
    """The prefix goes on differently than its fork: the row at the seam belongs to the fork alone."""
    other = Text((*text.tokens[:length], *reversed(text.tokens[length:])), text.rows.clone())
    other.rows[length:] = text.rows[length:].flip(0)
    open_with(engine, opening(1, 50, decodes=False))
    engine.observe(other.feature_batch(1, 0, 50))
    if computed:
        drafts_of(engine)
    open_with(engine, opening(2, 40, fork=(1, length)), opening(3, 40, fork=(1, length)))
    for sequence in (2, 3):
        engine.observe(text.feature_batch(sequence, length, 40, 1, final=True))
    assert [draft.tree for draft in drafts_of(engine)] == [expected(head, text, 40)] * 2


def test_a_fork_leaves_its_source_as_it_was(head: DraftHead, text: Text, engine: DraftEngine) -> None:
    open_with(engine, opening(1, 40))
    engine.observe(text.feature_batch(1, 0, 30))
    open_with(engine, opening(2, 40, fork=(1, 20)))
    backwards = Text(text.tokens[::-1], text.rows.flip(0))
    engine.observe(backwards.feature_batch(2, 20, 40, 1, final=True))
    drafts_of(engine)
    engine.observe(text.feature_batch(1, 30, 40, 1, final=True))
    assert drafts_of(engine) == (Draft(1, 1, expected(head, text, 40)),)


def test_after_every_round_the_tree_is_that_of_the_whole_sequence(
    head: DraftHead, text: Text, engine: DraftEngine
) -> None:
    """What was grown leaves no trace."""
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    committed, draft_round = 10, 1
    for accepted in (0, 3, 1, 0, 2, 4):
        assert drafts_of(engine) == (Draft(1, draft_round, expected(head, text, committed)),)
        draft_round += 1
        engine.observe(text.feature_batch(1, committed, committed + 1 + accepted, draft_round, final=True))
        committed += 1 + accepted


def test_only_the_newest_state_is_drafted(head: DraftHead, text: Text, engine: DraftEngine) -> None:
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    engine.observe(text.feature_batch(1, 10, 12, 2, final=True))
    engine.observe(text.feature_batch(1, 12, 13, 3, final=True))
    assert drafts_of(engine) == (Draft(1, 3, expected(head, text, 13)),)
    assert drafts_of(engine) == ()


def test_eight_sequences_at_once_get_the_trees_they_get_alone(
    head: DraftHead, text: Text, engine: DraftEngine
) -> None:
    sizes = range(9, 49, 5)
    for sequence, n in enumerate(sizes):
        open_with(engine, opening(sequence, n))
        engine.observe(text.feature_batch(sequence, 0, n, 1, final=True))
    drafts = {draft.sequence: draft.tree for draft in drafts_of(engine)}
    assert drafts == {sequence: expected(head, text, n) for sequence, n in enumerate(sizes)}


def test_the_first_trees_compute_the_prompts_of_their_sequences_alone(text: Text, head: DraftHead) -> None:
    """Prompts 1 and 2 are complete; prompt 3, of which 8 of 40 tokens have arrived, is not computed."""
    engine = make(head)
    proposer = engine.speculators["eagle"].proposer
    open_with(engine, opening(1, 20), opening(2, 30), opening(3, 40))
    for sequence, stop in ((1, 20), (2, 30)):
        engine.observe(text.feature_batch(sequence, 0, stop, 1, final=True))
    engine.observe(text.feature_batch(3, 0, 8))
    first, second, third = (engine._sequences.find(sequence) for sequence in (1, 2, 3))
    assert first
    assert second
    assert third
    assert proposer.due_rows([first, second]) > 40
    assert all(len(draft.tree) > 1 for draft in drafts_of(engine))
    assert (proposer.due_rows([first, second]), proposer.due_rows([third])) == (0, 0)


def test_prompts_without_due_rows_are_not_looked_at_in_every_step(text: Text, head: DraftHead) -> None:
    """Prefixes never get a root, and there may be many of them."""
    engine = make(head)
    proposer = engine.speculators["eagle"].proposer
    assert isinstance(proposer, EagleProposer)
    open_with(engine, opening(1, 40, decodes=False))
    for start, stop, num_due in ((0, 8, 7), (8, 40, 32)):
        engine.observe(text.feature_batch(1, start, stop))
        # The row of a feature needs the token after it.
        assert proposer.due_rows([]) == num_due
        proposer.catch_up()
        assert proposer.due_rows([]) == 0
        assert not proposer._without_root


def test_drafted_sequences_are_counted_as_they_open_and_close(engine: DraftEngine) -> None:
    sequences = engine._sequences
    prefix, undrafted = opening(1, 9, decodes=False), opening(2, 9, drafted=False)
    open_with(engine, prefix, undrafted, opening(3, 9), opening(4, 9))
    assert sequences.drafted == 2
    sequences.open(opening(4, 9))
    sequences.close(3)
    sequences.close(99)
    assert sequences.drafted == 1
    sequences.open(opening(4, 9, decodes=False))
    assert sequences.drafted == 0


def test_sequences_it_never_saw_open_get_their_root_back(text: Text, engine: DraftEngine) -> None:
    engine.observe(text.feature_batch(9, 10, 12, 4, final=True))
    assert drafts_of(engine) == (Draft(9, 4, single(text.tokens[12])),)
    open_with(engine, opening(10, 30, fork=(9, 5)))
    engine.observe(Features(1, 0, closings=(9, 10, 11)))


def test_a_missed_feature_batch_stops_drafting_of_the_sequence_without_an_error(
    text: Text, engine: DraftEngine
) -> None:
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    engine.observe(text.feature_batch(1, 11, 13, 3, final=True))
    assert drafts_of(engine) == (Draft(1, 3, single(text.tokens[13])),)
    assert engine.free_pages == 40


def test_every_page_comes_back(text: Text, engine: DraftEngine) -> None:
    open_with(engine, opening(1, 50, decodes=False))
    engine.observe(text.feature_batch(1, 0, 50))
    open_with(engine, *(opening(sequence, 55, fork=(1, 40)) for sequence in (2, 3, 4)))
    for sequence in (2, 3, 4):
        engine.observe(text.feature_batch(sequence, 40, 55, 1, final=True))
    drafts_of(engine)
    assert engine.free_pages < 40
    engine.observe(Features(1, 0, closings=(2, 1, 4, 3)))
    assert engine.free_pages == 40


def test_without_room_a_sequence_goes_undrafted(head: DraftHead, text: Text) -> None:
    """Two pages hold the rows of one sequence, not its growth; the next one finds nothing."""
    engine = make(head, pages=2)
    open_with(engine, opening(1, 32), opening(2, 32))
    engine.observe(text.feature_batch(1, 0, 30, 1, final=True))
    engine.observe(text.feature_batch(2, 0, 30, 1, final=True))
    assert [draft.tree for draft in drafts_of(engine)] == [single(text.tokens[30])] * 2
    engine.observe(Features(1, 0, closings=(1, 2)))
    assert engine.free_pages == 2


def test_sequences_that_want_no_drafts_get_none(text: Text, engine: DraftEngine) -> None:
    open_with(engine, opening(1, 10, drafted=False))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    assert drafts_of(engine) == ()


@pytest.mark.parametrize("room", [1, 2, 3, 20])
def test_no_node_lies_beyond_what_may_be_written(text: Text, engine: DraftEngine, room: int) -> None:
    """A limit of `room` tokens, the root among them; a tree of depth d writes up to d + 1 more."""
    open_with(engine, opening(1, 10, limit=room))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    (draft,) = drafts_of(engine)
    assert max(depths(draft.tree.parents)) == min(max(room - 2, 0), SHAPE.depth + 1)


@pytest.mark.parametrize("short", [0, 1, 2, 9])
def test_no_node_lies_beyond_the_context(
    tmp_path_factory: pytest.TempPathFactory, text: Text, short: int
) -> None:
    folder = tmp_path_factory.mktemp("short")
    base = write_base(folder / "base", Shape(layers=7, positions=41 + short))
    engine = make(load_head(write_head(folder / "head"), base, torch.float32, "cpu"))
    open_with(engine, opening(1, 40, limit=99), opening(2, 20, limit=99))
    engine.observe(text.feature_batch(1, 0, 40, 1, final=True))
    engine.observe(text.feature_batch(2, 0, 20, 1, final=True))
    deepest = [max(depths(draft.tree.parents)) for draft in drafts_of(engine)]
    assert deepest[0] == min(short, SHAPE.depth + 1)
    assert deepest[1] > 0


def test_features_that_do_not_match_their_batches_are_refused(text: Text, engine: DraftEngine) -> None:
    open_with(engine, opening(1, 10))
    batch = text.feature_batch(1, 0, 10)
    wrong = Features(1, 0, (), batch.feature_batches, (), text.rows[:9], 10, 0.0)
    with pytest.raises(WireError, match=r"\(9, 64\).*\(10, 64\)"):
        engine.observe(wrong)


def test_a_drafter_that_does_not_pay_says_so_and_draws_nothing(head: DraftHead, text: Text) -> None:
    engine = make(head, shape=TreeShape(3, 3, 12), curve=STEEP)
    open_with(engine, opening(1, 10), opening(2, 10))
    for sequence in (1, 2):
        engine.observe(text.feature_batch(sequence, 0, 10, 1, final=True))
    assert drafts_of(engine) == ()
    assert engine.paused_trees == 2 * LOOK_STEPS, "it looks at a plain step first"
    engine.observe(
        replace(text.feature_batch(1, 10, 11, 2, final=True), fed=2, seconds=1.0, wall=1.0, paused_trees=2)
    )
    engine.observe(text.feature_batch(2, 10, 11, 2, final=True))
    assert drafts_of(engine) == ()
    assert engine.paused_trees > 1
    engine.observe(text.feature_batch(1, 11, 12, 3, final=True))
    assert drafts_of(engine) == ()
    assert engine.paused_trees > 0, "who is told something nevertheless says it again"
    assert drafts_of(engine) == ()
    assert engine.paused_trees == 0, "nobody asked"


def test_alongside_other_drafters_it_answers_with_roots_instead_of_a_pause(
    head: DraftHead, text: Text
) -> None:
    """A pause stops the drafts of the whole ring, those of the other drafters included."""
    engine = make(head, shape=TreeShape(3, 3, 12), curve=STEEP)
    open_with(engine, opening(1, 10))
    engine.observe(replace(text.feature_batch(1, 0, 10, 1, final=True), must_answer=True))
    (draft,) = drafts_of(engine)
    assert (draft.sequence, len(draft.tree), engine.paused_trees) == (1, 1, 0)
    engine.observe(text.feature_batch(1, 10, 11, 2, final=True))
    assert drafts_of(engine) == ()
    assert engine.paused_trees > 0, "it is the only one again"


def test_features_that_arrive_after_a_pause_are_learned_in_one_batch(head: DraftHead, text: Text) -> None:
    """Thirty steps arrive as one feature batch: none counts as accepted, and the sequence continues."""
    engine = eager(head)
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    drafts_of(engine)
    before = tuner_of(engine).acceptance.by_depth()
    engine.observe(
        replace(text.feature_batch(1, 10, 40, 31, final=True), fed=1, seconds=1.0, paused_trees=29)
    )
    assert tuner_of(engine).acceptance.by_depth() == before
    (draft,) = drafts_of(engine)
    assert (draft.draft_round, draft.tree.tokens[0]) == (31, text.tokens[40])
    assert len(draft.tree) > 2


def test_after_a_pause_it_reports_that_it_has_caught_up_and_samples_once_it_is_asked(
    head: DraftHead, text: Text
) -> None:
    engine = eager(head)
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    drafts_of(engine)
    assert not engine.awake
    engine.observe(replace(text.feature_batch(1, 10, 40), fed=1, paused_trees=30))
    assert drafts_of(engine) == ()
    assert (engine.awake, engine.paused_trees) == (True, 0)
    engine.observe(replace(text.feature_batch(1, 40, 41, 32, final=True), fed=1))
    (draft,) = drafts_of(engine)
    assert (draft.draft_round, engine.awake) == (32, False)
    assert draft.tree.tokens[0] == text.tokens[41]


def test_a_pause_that_its_ring_ends_too_early_continues(head: DraftHead, text: Text) -> None:
    engine = make(head, shape=TreeShape(3, 3, 12), curve=STEEP)
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    drafts_of(engine)
    engine.observe(
        replace(text.feature_batch(1, 10, 11, 2, final=True), fed=1, seconds=1.0, wall=1.0, paused_trees=1)
    )
    drafts_of(engine)
    paused_trees = engine.paused_trees
    engine.observe(replace(text.feature_batch(1, 11, 14), fed=1, paused_trees=3))
    assert drafts_of(engine) == ()
    assert engine.paused_trees == paused_trees - 3


def test_sequences_it_never_saw_open_do_not_end_its_pause(head: DraftHead, text: Text) -> None:
    engine = make(head, shape=TreeShape(3, 3, 12), curve=STEEP)
    engine.observe(text.feature_batch(9, 10, 12, 4, final=True))
    assert drafts_of(engine) == ()
    assert engine.paused_trees > 0


def test_the_row_budget_of_a_frame_bounds_all_trees(head: DraftHead, text: Text) -> None:
    shape = TreeShape(3, 3, 12)
    cheap: Curve = ((1, 1.0), (512, 1.001))
    engine = looked(
        make_engine(
            head, configuration(shape, 40, PAGE_ROWS, rows=10, curve=cheap), curve=((1, 1e-4), (64, 1e-4))
        )
    )
    for sequence in range(4):
        open_with(engine, opening(sequence, 10 + sequence))
        engine.observe(text.feature_batch(sequence, 0, 10 + sequence, 1, final=True))
    sizes = [len(draft.tree) for draft in drafts_of(engine)]
    assert sum(sizes) == 10


def eager(head: DraftHead) -> DraftEngine:
    """Drafting costs nothing, so that it always pays."""
    cheap: Curve = ((1, 1.0), (512, 1.001))
    shape = TreeShape(3, 3, 12)
    made = make_engine(head, configuration(shape, 40, PAGE_ROWS, curve=cheap), curve=((1, 1e-4), (64, 1e-4)))
    return looked(made)


def looked(engine: DraftEngine) -> DraftEngine:
    """Plain steps of one text and of four were seen, and a tree of eight nodes."""
    rule = tuner_of(engine)
    assert rule.plan_levels(1, 4) == rule.plan_levels(4, 4) == 0
    rule.record_step([TreeOutcome(1, 9, (), 0)])
    rule.record_step([ROOT_ONLY])
    rule.acceptance = AcceptanceRates(4)
    return engine


@pytest.mark.parametrize("sent", [True, False])
def test_trees_that_came_too_late_teach_nothing(head: DraftHead, text: Text, sent: bool) -> None:
    """A frame with fewer rows than the trees have was composed without them, or with parts: how long that
    step
    took says nothing of plain ones. 63 trees beside a prompt were cut, and 64 texts believed to take 31 ms.
    """
    engine = eager(head)
    costs = tuner_of(engine).costs
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    (draft,) = drafts_of(engine)
    assert len(draft.tree) > 2
    feature_batch = text.feature_batch(1, 10, 11, 2, final=True)
    before = costs.baseline(1)
    engine.observe(replace(feature_batch, fed=len(draft.tree) if sent else 1, seconds=1.0, wall=9.0))
    assert sent or costs.baseline(1) == before
    assert (tuner_of(engine).acceptance.by_depth()[0] < PRIOR_ACCEPTANCE) is sent


def test_what_was_accepted_is_learned(head: DraftHead, text: Text) -> None:
    engine = eager(head)
    open_with(engine, opening(1, 10))
    engine.observe(text.feature_batch(1, 0, 10, 1, final=True))
    (draft,) = drafts_of(engine)
    engine.observe(replace(text.feature_batch(1, 10, 13, 2, final=True), fed=len(draft.tree), seconds=1.0))
    assert tuner_of(engine).acceptance.by_depth()[0] > PRIOR_ACCEPTANCE


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_that_what_drafts_lacks_end_the_drafting_of_their_sequence_alone(
    head: DraftHead, text: Text, engine: DraftEngine, wrong: int
) -> None:
    """An embedding would read past its end, and the drafter be gone."""
    lane = engine.speculators["eagle"]
    engine = DraftEngine(
        {"eagle": (lane.proposer, lane.budget)}, configuration(SHAPE, 40, PAGE_ROWS), ids=256
    )
    open_with(engine, opening(1, 40), opening(2, 40))
    spoilt = Text((*text.tokens[:20], wrong, *text.tokens[21:]), text.rows)
    engine.observe(spoilt.feature_batch(1, 0, 40, 1, final=True))
    engine.observe(text.feature_batch(2, 0, 40, 1, final=True))
    drafts = {draft.sequence: draft.tree for draft in drafts_of(engine)}
    assert drafts == {1: single(text.tokens[40]), 2: expected(head, text, 40)}
