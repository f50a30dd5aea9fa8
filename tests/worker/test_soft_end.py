"""Soft ends at the last stage: which target becomes the end token, in any tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specsot.core.frames import End, Opening
from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.core.tree import Tree, chain, single
from specsot.core.vocabulary import describe
from specsot.grammar import SentenceEnds
from specsot.params import Form, Sampling
from specsot_worker.core.accept import DecodeState, accept_tree
from specsot_worker.core.soft_end import SoftEndRule, make_rule
from specsot_worker.sampling import TargetQuery, choose_on_device, find_targets, read_targets, takes_argmax

TEXTS = (None, b"It", b" rains", b".", b" The", b" sun", b" shines", b"5", b" and", b"\n", b" ", b"3")
VOCABULARY = describe(TEXTS)
END, IT, RAINS, DOT, THE, SUN, SHINES, FIVE, AND, LINE, SPACE, THREE = range(len(TEXTS))
SENTENCES = SentenceEnds(VOCABULARY)
OPENING = Opening(1, 4, stop_ids=(END,), limit=40, soft_end=SoftEnd(3, END))


def rule(opening: Opening = OPENING) -> SoftEndRule:
    return SoftEndRule(opening, SENTENCES)


def test_a_sentence_that_would_begin_becomes_the_end() -> None:
    tree = chain([DOT, THE, SUN])
    assert rule().change([IT, RAINS, DOT], tree, [THE, SUN, SHINES]) == [END, SUN, SHINES]
    assert rule().change([IT, RAINS, DOT], single(DOT), [LINE]) == [END]


@pytest.mark.parametrize("target", [AND, FIVE, SPACE, SUN, END])
def test_whatever_goes_on_with_the_sentence_stays(target: int) -> None:
    assert rule().change([IT, RAINS, DOT], single(DOT), [target]) == [target]
    targets: list[int | None] = [THE]
    assert rule().change([IT, RAINS, SPACE, THREE, DOT], single(DOT), targets) is targets


def test_only_the_accepted_path_is_looked_at() -> None:
    #       RAINS
    #      /     \
    #   DOT       AND      both are followed by THE
    tree = Tree((RAINS, DOT, AND, THE, THE), (0, 0, 0, 1, 2))
    assert rule().change([IT, RAINS], tree, [AND, THE, THE, None, SUN]) == [AND, THE, THE, None, SUN]
    assert rule().change([IT, RAINS], tree, [DOT, THE, THE, SUN, SUN]) == [DOT, END, THE, SUN, SUN]
    assert rule().change([IT, RAINS], tree, [DOT, None, THE, SUN, SUN]) == [DOT, None, THE, SUN, SUN]


def test_nothing_ends_before_the_soft_end_and_the_least_tokens() -> None:
    before: list[int | None] = [THE]
    assert (
        rule(replace(OPENING, soft_end=SoftEnd(4, END))).change([IT, RAINS, DOT], single(DOT), before)
        is before
    )
    assert rule(replace(OPENING, min_tokens=9)).change([IT, RAINS, DOT], single(DOT), before) is before
    late = [IT, RAINS, DOT] * 3
    assert rule(replace(OPENING, min_tokens=9)).change(late, single(DOT), before) == [END]


def test_tokens_of_an_earlier_epoch_count() -> None:
    opening = replace(OPENING, prompt=7, generated=3)
    state = DecodeState(opening)
    state.read_prompt(0, (SUN, SUN, SUN, SUN, IT, RAINS, DOT))
    assert rule(opening).change(state.tokens, single(DOT), [THE]) == [END]


def test_any_way_of_reaching_the_end_gives_the_same_tokens() -> None:
    words = [IT, RAINS, SPACE, THREE, DOT, FIVE, AND, SUN, DOT, THE, SUN, SHINES, DOT, LINE]

    def write(depth: int) -> list[int]:
        state = DecodeState(OPENING, tokens=[words[0]])
        ends = rule()
        while True:
            at = len(state.tokens)
            tree = chain([state.tokens[-1], *words[at : at + depth]])
            targets: list[int | None] = [*words[at : at + len(tree)], *[None] * (at + len(tree) - len(words))]
            outcome = accept_tree(state, 1, tree, ends.change(state.tokens, tree, targets))
            if outcome.end:
                assert outcome.end is End.STOP
                return state.tokens

    assert [write(depth) for depth in range(5)] == [[*words[:9], END]] * 5


@pytest.mark.parametrize(
    "opening",
    [
        replace(OPENING, soft_end=None),
        replace(OPENING, plan=PlanRules()),
        replace(OPENING, form=Form("regex", ("a",))),
        replace(OPENING, stop_ids=(SUN,)),
    ],
)
def test_a_sequence_without_a_soft_end_has_no_rule(opening: Opening) -> None:
    assert make_rule(opening, SENTENCES) is None
    assert make_rule(OPENING, None) is None
    assert make_rule(OPENING, SENTENCES) is not None


def unneeded() -> torch.Tensor:
    raise AssertionError("the argmax of every row is allowed")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.1), Sampling(0.1, repetition_penalty=1.01)])
def test_targets_are_changed_however_they_are_found(at_once: bool, sampling: Sampling) -> None:
    state = DecodeState(replace(OPENING, sampling=sampling), tokens=[IT, RAINS, DOT], soft_end=rule())
    other = DecodeState(replace(OPENING, sampling=sampling, soft_end=None), tokens=[IT, RAINS, DOT])
    logits = torch.zeros(4, len(TEXTS))
    for row, token in enumerate((THE, SUN, THE, SUN)):
        logits[row, token] = 50
    tree = chain([DOT, THE])
    mispredicted: list[int] = []
    queries = [TargetQuery(one, row, tree, 7, ()) for one, row in ((state, 0), (other, 2))]
    found = find_targets(logits, queries, at_once, lambda _: None, mispredicted.append)
    assert found == [[END, SUN], [THE, SUN]]
    on_device = not sampling.penalises and (at_once or sampling.temperature == 0)
    assert mispredicted == ([1] if on_device else []), "the device knows another token"
    if all(map(takes_argmax, queries)):
        mispredicted.clear()
        tokens = choose_on_device(logits, ())
        assert read_targets(tokens, queries, unneeded, lambda _: None, mispredicted.append) == found
        assert mispredicted == [1]
        assert read_targets(tokens, queries, unneeded, None, mispredicted.append) == found
        assert mispredicted == [1], "the device was told of no tokens"
