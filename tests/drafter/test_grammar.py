"""Drafts under a grammar: nothing forbidden is guessed, what is forced is drafted whole."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specsot.core.frames import FeatureBatch, Features
from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.core.tree import Tree
from specsot.core.vocabulary import Vocabulary, describe, read_vocabulary
from specsot.grammar import Grammar, IsolatedGrammar, TokenAutomaton, grammar_of
from specsot.grammar.answers import AnswerAutomaton
from specsot.members import TreeShape
from specsot.params import Form
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequences, GrammarState, own_tokens
from specsot_drafter.eagle_kv import DraftPages
from specsot_drafter.engine import DraftEngine
from specsot_drafter.grammar import GrammarGuide, bar_after_ends, filter_candidates
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import make_engine
from specsot_drafter.proposers import eagle
from tests.drafter.ring import Unguided, configuration, drafts_of, opening
from tests.there import there
from tests.trees import path

RULES = PlanRules(direct=False)
SHAPE = TreeShape(depth=3, top_k=4, nodes=16, fixed=True)
PROMPT = tuple(range(100, 112))
HIDDEN = 128  # of the small model


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return read_vocabulary(demo_model / "base", 8192)


@pytest.fixture(scope="module")
def rules(vocabulary: Vocabulary) -> TokenAutomaton:
    wait([grammar_of(vocabulary, opening(1, 9, plan=RULES))])
    return TokenAutomaton(vocabulary, RULES)


@pytest.fixture(params=["levels", "graph"])
def grown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Unguided]:
    """Level by level, or as graphs do; returns those."""
    made: list[Unguided] = []
    if request.param == "graph":

        def graphs(head: DraftHead, memory: DraftPages, shape: TreeShape, _: object) -> Unguided:
            made.append(Unguided(head, memory, shape))
            return made[-1]

        monkeypatch.setattr(eagle, "_graphs", graphs)
    return made


@pytest.fixture(scope="module")
def head(demo_model: Path) -> DraftHead:
    return load_head(demo_model / "eagle3", demo_model / "base", torch.float32, "cpu")


def plan_text(rules: TokenAutomaton, tokens: int) -> list[int]:
    """The first tokens of some valid plan: what is forced, else the smallest id that may follow."""
    state, written = rules.start(), list[int]()
    while len(written) < tokens:
        token = (rules.forced(state) or (int(rules.mask(state, 400).argmax()),))[0]
        after = there(rules.advance(state, token))
        written, state = [*written, token], after
    return written


def teach(
    engine: DraftEngine,
    written: list[int],
    generated: int = 0,
    limit: int = 400,
    forced: tuple[int, ...] = (),
    **more: object,
) -> None:
    """A prompt, then a plan of which the last token is not fed yet; features are noise.

    generated: how many of the plan's tokens came back as prompt, after a repair.
    """
    fed, root = (*PROMPT, *written[:-1]), written[-1]
    more = {"plan": RULES, **more}
    opened = opening(1, len(PROMPT) + generated, limit=limit, generated=generated, **more)
    rows = torch.randn(len(fed), HIDDEN, generator=torch.Generator().manual_seed(len(fed)))
    engine.observe(
        Features(1, 0, (opened,), (FeatureBatch(1, 0, fed, root, 2, forced),), (), rows, len(fed), 0.0)
    )


def drafted(engine: DraftEngine) -> Tree:
    (draft,) = drafts_of(engine)
    return draft.tree


def test_every_node_may_follow_what_is_written(
    head: DraftHead, vocabulary: Vocabulary, rules: TokenAutomaton, grown: list[Unguided]
) -> None:
    """At least somewhere there is one; where nothing that was grown may be, the root goes alone."""
    sizes: list[int] = []
    for length in (1, 3, 6, 9, 14, 20):
        written = plan_text(rules, length)
        engine = make_engine(head, configuration(SHAPE, 8, 64), vocabulary)
        teach(engine, written)
        tree = drafted(engine)
        sizes.append(len(tree))
        for node in range(len(tree)):
            state = rules.start()
            for token in (*written[:-1], *(tree.tokens[i] for i in path(tree.parents, node))):
                state = there(rules.advance(state, token))
    assert max(sizes) > 1
    assert grown or min(sizes) > 1, "a guide finds what may be"
    assert [each.runs for each in grown] == [1] * len(grown), "under a grammar, too, all of it is one graph"


def test_every_node_may_follow_in_an_answer_with_a_form(
    head: DraftHead, vocabulary: Vocabulary, grown: list[Unguided]
) -> None:
    form = Form("json_schema", ('{"type": "array", "items": {"type": "integer"}, "maxItems": 9}',))
    coming = grammar_of(vocabulary, opening(1, 9, form=form, stop_ids=(2,)), guided=False)
    wait([coming] if isinstance(coming, Future) else [])
    held, written = AnswerAutomaton(vocabulary, form, (2,)), list[int]()
    place = held.start()
    for token in (vocabulary.bytes.index(byte) for byte in (b"[", b"1", b",", b"2")):
        written.append(token)
        place = there(held.advance(place, token))
        engine = make_engine(head, configuration(SHAPE, 8, 64), vocabulary)
        teach(engine, written, plan=None, form=form, stop_ids=(2,))
        tree = drafted(engine)
        assert grown or len(tree) > 1
        for node in range(1, len(tree)):
            ahead = place
            for step in path(tree.parents, node)[1:]:
                behind, token = ahead, tree.tokens[step]
                ahead = held.advance(behind, token) if behind else None
                assert ahead is not None or (behind is not None and held.mask(behind, 99)[token])


def test_without_a_vocabulary_a_sequence_counts_as_free(head: DraftHead, rules: TokenAutomaton) -> None:
    """And then the head's noise is not valid: the test above can fail."""
    engine = make_engine(head, configuration(SHAPE, 8, 64), None)
    written = plan_text(rules, 3)
    teach(engine, written)
    tree, state = drafted(engine), rules.start()
    for token in written:
        state = there(rules.advance(state, token))
    firsts = [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]
    assert any(rules.advance(state, token) is None for token in firsts)


def test_forced_tokens_are_added_to_the_tree_alongside_drafted_ones(
    head: DraftHead, vocabulary: Vocabulary, rules: TokenAutomaton
) -> None:
    written, shape = plan_text(rules, 9), TreeShape(depth=3, top_k=4, nodes=8, fixed=True)
    for limit, room in ((400, 3), (11, 1)):
        engine = make_engine(head, configuration(shape, 8, 64), vocabulary)
        teach(engine, written, limit=limit, forced=(7, 8, 9))
        tree = drafted(engine)
        chains = [tuple(tree.tokens[i] for i in path(tree.parents, node)) for node in range(len(tree))]
        assert (written[-1], *(7, 8, 9)[:room]) in chains
        assert (written[-1], *(7, 8, 9, 0)[: room + 1]) not in chains


def test_a_repaired_sequence_stands_where_it_stood(
    head: DraftHead, vocabulary: Vocabulary, rules: TokenAutomaton
) -> None:
    """After a repair its own tokens come back as the end of its prompt."""
    written = plan_text(rules, 9)
    trees: list[Tree] = []
    for generated in (0, 8):
        engine = make_engine(head, configuration(SHAPE, 8, 64), vocabulary)
        teach(engine, written, generated)
        trees.append(drafted(engine))
    assert trees[0] == trees[1]


def test_what_may_be_is_the_best_there_is_of_it(rules: TokenAutomaton) -> None:
    """A barred candidate takes what is below it along; what is free stays as it was."""
    text, written = DraftSequences(None).open(opening(1, len(PROMPT))), plan_text(rules, 3)
    text.set_grammar(rules)
    text.observe(FeatureBatch(1, 0, (*PROMPT, *written[:2]), written[2], 2))
    assert text.grammar_state is not None
    wrong, right = (
        next(t for t in range(8192) if (rules.advance(text.grammar_state.state, t) is not None) == may)
        for may in (False, True)
    )
    state = there(rules.advance(text.grammar_state.state, right))
    below = next(t for t in range(8192) if rules.advance(state, t) is not None)
    tokens = np.array([[wrong, right, below, below, wrong]])
    scores, parents = np.array([[-0.1, -0.2, -0.3, -0.4, -0.5]]), np.array([[0, 0, 1, 2, 2]])
    offer = Candidates(tokens, scores, parents, np.array([1, 1, 2, 2, 2]))
    none = -np.inf
    assert filter_candidates(offer, [text], 9).scores.tolist() == [[none, -0.2, none, -0.4, none]]
    assert filter_candidates(offer, [text], 1).scores.tolist() == [[none, -0.2, none, none, none]]
    free = DraftSequences(None).open(opening(2, len(PROMPT)))
    assert filter_candidates(offer, [free], 1) is offer
    text.grammar_state.state = None
    assert not np.isfinite(filter_candidates(offer, [text], 9).scores).any(), "it broke its grammar"


def test_a_free_sequence_drafts_the_same_alongside_a_constrained_one(
    head: DraftHead, vocabulary: Vocabulary, rules: TokenAutomaton, grown: list[Unguided]
) -> None:
    """And as many passes of the head are run for it."""
    trees: list[Tree] = []
    for beside in (True, False):
        engine = make_engine(head, configuration(SHAPE, 12, 64), vocabulary)
        rows = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(2))
        free = opening(2, len(PROMPT), limit=400)
        if beside:
            teach(engine, plan_text(rules, 6))
        engine.observe(Features(1, 0, (free,), (FeatureBatch(2, 0, PROMPT, 5, 2),), (), rows, 12, 0.0))
        trees += [draft.tree for draft in drafts_of(engine) if draft.sequence == 2]
    assert trees[0] == trees[1]
    assert [each.runs for each in grown] == [1] * len(grown)


@pytest.mark.parametrize(
    ("first", "tokens", "own"),
    [
        (0, [4, 5, 6, 7, 8], [7, 8]),
        (2, [6, 7, 8], [7, 8]),
        (4, [8], [8]),
        (9, [5, 6], [5, 6]),
        (0, [1, 2], []),
    ],
)
def test_only_what_the_sequence_wrote_counts(first: int, tokens: list[int], own: list[int]) -> None:
    """A prompt of five tokens of which the last two, positions 3 and 4, are its own."""
    assert own_tokens(opening(1, 5, generated=2), first, tokens) == own


def test_a_late_grammar_starts_at_the_current_position_of_the_sequence(rules: TokenAutomaton) -> None:
    """Until then the sequence counts as free."""
    coming: Future[Grammar] = Future()
    text, written = DraftSequences(None).open(opening(1, len(PROMPT))), plan_text(rules, 6)
    text.compiling = coming
    text.observe(FeatureBatch(1, 0, (*PROMPT, *written[:3]), written[3], 2))
    assert text.grammar_state is None
    coming.set_result(rules)
    assert text.grammar_state is not None
    state = rules.start()
    for token in written[:4]:
        state = rules.advance(state, token)
    assert text.grammar_state.state == state
    text.observe(FeatureBatch(1, text.committed, (written[3],), written[4], 3))
    assert text.grammar_state.state == rules.advance(state, written[4])


def test_a_grammar_that_failed_bars_the_drafts_of_its_sequence_alone() -> None:
    def broken() -> Grammar:
        raise ValueError("the library gave up")

    failed = IsolatedGrammar(broken)
    head: Any = SimpleNamespace(draft_vocab=4, device="cpu", to_target=lambda ids: ids)
    guide = GrammarGuide(head, [GrammarState(failed, failed.start()), None], [5, 5])
    barred, free = guide.mask(torch.zeros(2, 1, 4))
    assert bool(torch.isneginf(barred).all())
    assert free.tolist() == [[0.0] * 4]


def test_nothing_new_is_drafted_where_a_sequence_with_a_soft_end_ends() -> None:
    texts = (None, b"It", b" rains", b".", b" The", b" sun", b"5", b"\n", b")")
    vocabulary = describe(texts)
    _, it, rains, dot, the, sun, five, line, close = range(len(texts))
    sequences = DraftSequences(vocabulary)
    soft = replace(opening(1, 9, limit=30, stop_ids=(0,)), prompt=2, soft_end=SoftEnd(4, 0))
    ending, free = sequences.open(soft), sequences.open(replace(soft, sequence=2, soft_end=None))
    for one in (ending, free):
        one.observe(FeatureBatch(one.id, 0, (sun, sun), it, 1))
        one.observe(FeatureBatch(one.id, 2, (it,), rains, 2))
    # root "rains" -> ".", " The"; "." -> " The", "5", line feed; " The" -> " sun"; " The" after "." -> " sun"
    tokens = [dot, the, the, five, line, sun, sun]
    grown = Candidates(
        np.array([tokens, tokens]),
        np.zeros((2, 7)),
        np.array([[0, 0, 1, 1, 1, 2, 3]] * 2),
        np.array([1, 1, 2, 2, 2, 2, 3]),
    )
    # Two tokens are written, so that the target after "." is the fourth: one too early.
    assert bar_after_ends(grown, [ending, free]) is grown
    for one in (ending, free):
        one.observe(FeatureBatch(one.id, 3, (rains,), close, 3))
    barred = bar_after_ends(grown, [ending, free]).scores == -np.inf
    assert barred.tolist() == [[False, False, True, False, True, False, True], [False] * 7]
