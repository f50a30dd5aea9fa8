"""Targets in trees: every node by its own history, whatever else is in the tree and in the frame."""

import random

import numpy as np
import pytest
import torch

from specsot.core.frames import Logprob, Opening, Outcome
from specsot.core.tree import Tree, accept, single
from specsot.params import Sampling
from specsot_worker.core.accept import DecodeState, TokenCounts, accept_tree
from specsot_worker.logprobs import add_logprobs
from specsot_worker.penalties import apply_penalties
from specsot_worker.sampling import DrawRequest, TargetQuery, choose_tokens, find_targets
from tests.conftest import seeds
from tests.trees import path

V = 12  # few, so that trees meet the targets and tokens come again
SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.7),
    Sampling(presence_penalty=1.5, frequency_penalty=0.7),
    Sampling(logit_bias=((1, 2.0), (4, -3.0))),
    Sampling(logit_bias=((1, -100.0), (2, -100.0), (4, -3.0))),
    Sampling(temperature=0.8),
    Sampling(0.9, 0.95, 8, 0.02, 1.3, 0.4, 0.3, ((2, 1.0), (7, -0.5))),
]


def model(text):
    """Logits [V] that depend on the whole text, like a real model's."""
    return torch.randn(V, generator=torch.Generator().manual_seed(hash(tuple(text)) % 2**31)) * 2


def write_plainly(prompt, count, sampling, ordinal):
    """One token at a time, penalties by the definition: what stands there, and what was written."""
    text = list(prompt)
    for _ in range(count):
        row = model(text)
        written = text[len(prompt) :]
        apply_penalties(row, sampling, {token: written.count(token) for token in text})
        (token,) = choose_tokens(row[None], [DrawRequest(sampling, 7, ordinal, len(text))])
        text.append(token)
    return text[len(prompt) :]


def tree_around(root, truth, rng):
    """A random tree that often holds the next true tokens."""
    tokens, parents = [root], [0]
    for _ in range(rng.randrange(14)):
        parent = rng.randrange(len(tokens))
        depth = len(path(parents, parent)) - 1
        known = truth[depth] if depth < len(truth) and rng.random() < 0.6 else rng.randrange(V)
        tokens.append(known)
        parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


def question(written, row, tree, place, masks=None):
    return TargetQuery(written, row, tree, place, masks or [None] * len(tree))


def opened(prompt, sampling, ordinal, **more):
    opening = Opening(ordinal, len(prompt), sampling=sampling, seed=7, ordinal=ordinal, limit=1000, **more)
    return DecodeState(opening, history=TokenCounts(prompt) if sampling.penalises else None)


@pytest.mark.parametrize("seed", seeds(6, quick=3))
def test_law_1_any_tree_in_any_company_writes_what_plain_decoding_writes(seed):
    rng, count = random.Random(seed), 24
    prompts = [[rng.randrange(V) for _ in range(rng.randrange(1, 9))] for _ in SAMPLINGS]
    plain = [write_plainly(prompts[n], count, sampling, n) for n, sampling in enumerate(SAMPLINGS)]
    sequences = [opened(prompts[n], sampling, n) for n, sampling in enumerate(SAMPLINGS)]
    deepest = 0
    for written, prompt in zip(sequences, prompts):  # a prompt's last row is a tree of one node
        (targets,) = find_targets(
            model(prompt)[None], [question(written, 0, single(prompt[-1]), len(prompt))]
        )
        written.write((targets[0],))
    while going := [n for n, written in enumerate(sequences) if len(written.tokens) < count]:
        asked, rows = [], []
        for n in rng.sample(going, rng.randint(1, len(going))):
            done = sequences[n].tokens
            tree = tree_around(done[-1], plain[n][len(done) :], rng)
            place = len(prompts[n]) + len(done)
            asked.append((n, question(sequences[n], len(rows), tree, place)))
            for node in range(len(tree)):
                below = [tree.tokens[one] for one in path(tree.parents, node)[1:]]
                rows.append(model([*prompts[n], *done, *below]))
        targets = find_targets(torch.stack(rows), [one for _, one in asked])
        for (n, one), found in zip(asked, targets):
            outcome = accept_tree(sequences[n], 1, one.tree, found)
            deepest = max(deepest, len(outcome.tokens))
    assert [written.tokens[:count] for written in sequences] == plain
    assert deepest > 3, "deep paths must really have been accepted"


def test_biases_that_only_lower_tokens_leave_a_sequence_greedy():
    """The argmax suffices; only where a bias lowers it, another one is chosen."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
    state = opened([0], Sampling(logit_bias=((1, -100.0),)), 1)
    asked = question(state, 0, Tree((0, 2), (0, 0)), 1)
    wrong = []
    found = find_targets(logits, [asked], meanwhile=lambda _: None, mispredicted=wrong.append)
    assert (found, wrong) == ([[2, 3]], [1])
    assert state.greedy
    assert not opened([0], Sampling(logit_bias=((1, 1.0),)), 1).greedy
    assert not opened([0], Sampling(0.5, logit_bias=((1, -1.0),)), 1).lowered


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampling_after_every_node_gives_the_tokens_of_a_walk(sampling):
    """A GPU samples all nodes at once, alongside a sequence under a grammar, which walks its tree."""
    rng, generator, deepest = random.Random(8), torch.Generator().manual_seed(8), 0
    for _ in range(30):
        tree = tree_around(3, [rng.randrange(V) for _ in range(6)], rng)
        logits = torch.randn(len(tree) + 1, V, generator=generator)
        held = question(opened([3], Sampling(0.9), 2), len(tree), single(5), 9, [np.arange(V) % 3 == 1])
        asked = [question(opened([3], sampling, 1), 0, tree, rng.randrange(99)), held]
        (walked, beside), (drawn, also) = (find_targets(logits, asked, way) for way in (False, True))
        accepted = accept(tree, [-1 if target is None else target for target in walked])
        assert [drawn[node] for node in accepted] == [walked[node] for node in accepted]
        assert accept(tree, [-1 if target is None else target for target in drawn]) == accepted
        assert beside == also
        deepest = max(deepest, len(accepted))
    assert deepest > 1


def test_logits_stay_as_they_are_and_plain_rows_are_one_argmax():
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    tree = Tree((1, 2, 3), (0, 0, 1))
    shaped = Sampling(0.7, repetition_penalty=2.0, logit_bias=((0, 9.0),))
    masks = [np.arange(V) % 2 == 0] * 3
    asked = [
        question(opened([1], Sampling(), 1), 0, tree, 1),
        question(opened([1, 2], shaped, 2), 3, tree, 2, masks),
        question(opened([1], Sampling(), 3), 6, single(4), 1),
    ]
    plain, walked, last = find_targets(logits, asked)
    assert torch.equal(logits, before)
    assert plain == logits[:3].argmax(-1).tolist()
    assert last == [int(logits[6].argmax())]
    assert walked[0] % 2 == 0


def test_masks_hold_on_every_node_that_acceptance_comes_by():
    logits, tree = torch.zeros(4, V), Tree((0, 5, 6, 9), (0, 0, 1, 0))
    allowed = [np.arange(V) == token for token in (5, 6, 7)]
    for sampling in (Sampling(), Sampling(0.9, logit_bias=((11, 100.0),))):
        asked = question(opened([0], sampling, 1), 0, tree, 1, [*allowed, None])
        assert find_targets(logits, [asked]) == [[5, 6, 7, None]]


@pytest.mark.parametrize("seed", seeds(4, quick=2))
def test_under_a_grammar_the_target_is_the_best_of_what_is_allowed(seed):
    """Whether the whole row's best is that, or not; in company of free text, and of rows without numbers."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = set()
    for _ in range(40):
        tree = tree_around(3, [rng.randrange(V) for _ in range(6)], rng)
        logits = torch.randn(2 * len(tree), V, generator=generator)
        masks = [np.array([rng.random() < 0.7 for _ in range(V)]) for _ in range(len(tree))]
        masks[-1] = None if rng.random() < 0.5 else masks[-1]
        for mask in masks:
            if mask is not None:
                mask[rng.randrange(V)] = True
        if rng.random() < 0.2:
            logits[0] = float("nan")
        free, held = opened([3], Sampling(), 1), opened([3], Sampling(), 2)
        asked = [question(free, len(tree), tree, 1), question(held, 0, tree, 1, masks)]
        plain, found = find_targets(logits, asked)
        assert plain == logits[len(tree) :].argmax(-1).tolist()
        for node, target in enumerate(found):
            if target is not None:
                bars = (
                    torch.zeros(V)
                    if masks[node] is None
                    else torch.from_numpy(np.where(masks[node], 0, -1e9))
                )
                assert target == int((logits[node] + bars).argmax())
                kinds.add(target == int(logits[node].argmax()))
        accepted = accept(tree, [-1 if target is None else target for target in found])
        numbers = bool(logits[0].isfinite().all())
        assert all(found[node] is not None for node in accepted) == numbers
    assert kinds == {True, False}, "some were allowed, some were not"


def test_what_a_grammar_allows_is_masked_nowhere(monkeypatch):
    """Only rows whose best token is forbidden are looked at once more."""
    looked = []
    monkeypatch.setattr(
        "specsot_worker.sampling.choose_tokens",
        lambda rows, requests, *_: looked.append(len(rows)) or choose_tokens(rows, requests),
    )
    tree = Tree((0, 5, 6, 7), (0, 0, 1, 2))
    logits = torch.zeros(4, V)
    logits[range(4), [5, 6, 7, 8]] = 9.0
    asked = question(opened([0], Sampling(), 1), 0, tree, 1, [np.arange(V) != 3] * 4)
    assert find_targets(logits, [asked]) == [[5, 6, 7, 8]]
    assert looked == [4]
    asked = question(opened([0], Sampling(), 1), 0, tree, 1, [np.arange(V) != 7] * 4)
    assert find_targets(logits, [asked]) == [[5, 6, 0, None]]
    assert looked == [4, 4, 1]


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_a_row_without_numbers_has_no_target(sampling):
    logits = torch.zeros(3, V)
    logits[0] = float("nan")
    asked = question(opened([1], sampling, 1), 0, Tree((1, 2, 3), (0, 0, 0)), 1)
    assert find_targets(logits, [asked]) == [[None, None, None]]


def test_chances_are_the_models_own_whatever_chose_the_token():
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(2))
    tree = Tree((1, 2, 3), (0, 0, 1))
    sampling = Sampling(0.7, repetition_penalty=1.9, logit_bias=((2, 50.0),))
    asked = [
        question(opened([1], sampling, 1, logprobs=3), 0, tree, 1, [np.arange(V) < 6] * 3),
        question(opened([1], Sampling(), 2), 3, single(4), 1),
        question(opened([1], Sampling(), 3, logprobs=0), 4, single(4), 1),
        question(opened([1], Sampling(), 4, logprobs=20), 5, single(4), 1),
    ]
    outcomes = [
        Outcome(1, 1, (0, 1), (2, 5)),
        Outcome(2, 0, (), (4,)),
        Outcome(3, 0, (), (8,)),
        Outcome(4, 1, (0,), (9,)),
    ]
    told = add_logprobs(outcomes, asked, logits)
    truth = logits.log_softmax(-1)
    for outcome, rows, count in zip(told, ([0, 1], [3], [4], [5]), (3, None, 0, V)):
        wanted = 0 if count is None else len(rows)
        assert len(outcome.chances) == wanted
        for row, token, chance in zip(rows, outcome.tokens, outcome.chances):
            best = truth[row].topk(count)
            assert chance.logprob == pytest.approx(float(truth[row, token]))
            assert [t for t, _ in chance.top] == best.indices.tolist()
            assert [p for _, p in chance.top] == pytest.approx(best.values.tolist())
    assert told[1] == outcomes[1]
    assert isinstance(told[0].chances[0], Logprob)


def test_a_sequence_that_failed_has_no_chances():
    asked = question(opened([1], Sampling(), 1, logprobs=2), 0, single(1), 1)
    failed = Outcome(1, 1, (0,), ())
    assert add_logprobs([failed], [asked], torch.zeros(1, V)) == [failed]


def test_the_walk_and_acceptance_agree():
    """What the walk did not visit is never asked for."""
    rng = random.Random(5)
    for _ in range(50):
        tree = tree_around(3, [rng.randrange(V) for _ in range(6)], rng)
        logits = torch.randn(len(tree), V, generator=torch.Generator().manual_seed(rng.randrange(9999)))
        (targets,) = find_targets(logits, [question(opened([3], SAMPLINGS[-1], 1), 0, tree, 1)])
        accepted = accept(tree, [-1 if target is None else target for target in targets])
        assert all(targets[node] is not None for node in accepted)
        assert sum(target is not None for target in targets) == len(accepted)
