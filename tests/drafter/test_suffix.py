"""Looking into texts: what followed the last time, how far it is trusted, what forks share, what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specsot.core.frames import FeatureBatch, Features
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.core.suffixes import BREAK, SeenTokens, grow_suffixes
from specsot_drafter.proposers.suffix import SuffixProposer, SuffixShape
from tests.drafter.ring import opening
from tests.there import there

LONG = tuple(range(50, 60))
SUFFIXES = SuffixShape(8, 12, places=8, min_match=1, past=64)


def ngrams(tokens: int) -> SuffixProposer:
    return SuffixProposer(SuffixShape(tokens, tokens))


def taught(
    texts: DraftSequences, drafter: SuffixProposer, sequence: int, tokens: tuple[int, ...], **more: object
) -> None:
    """A text whose last token is not fed yet."""
    drafter.open(texts.open(opening(sequence, len(tokens) - 1, **more)))  # type: ignore[arg-type]
    tell(texts, drafter, sequence, 0, tokens)


def tell(
    texts: DraftSequences, drafter: SuffixProposer, sequence: int, start: int, tokens: tuple[int, ...]
) -> None:
    feature_batch = FeatureBatch(sequence, start, tokens[:-1], tokens[-1], 1)
    texts.observe([feature_batch])
    drafter.observe(Features(1, 0, feature_batches=(feature_batch,)))


def chain(texts: DraftSequences, drafter: SuffixProposer, sequence: int, levels: int = 8) -> list[int]:
    text = there(texts.find(sequence))
    offer = drafter.propose([text], levels)
    if offer is None:
        return []
    return offer.tokens[0][np.isfinite(offer.scores[0])].tolist()


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ((1, 2, 3, 4, 1, 2), [3, 4, 1, 2]),
        ((1, 2, 3, 9, 2, 3, 8, 1, 2, 3), [9, 2, 3, 8, 1, 2, 3]),
        ((1, 2, 7, 1, 2, 8, 1, 2), [8, 1, 2]),
        ((1, 2, 3, 4, 5), []),
        ((5, 5, 5, 5), [5]),
        ((1, 2), []),
    ],
    ids=["once", "the longest stretch", "the newest place", "nothing", "only itself", "two"],
)
def test_what_followed_the_last_time_is_suggested(tokens: tuple[int, ...], found: list[int]) -> None:
    texts, drafter = DraftSequences(None), ngrams(8)
    taught(texts, drafter, 1, tokens, limit=100)
    assert chain(texts, drafter, 1) == found


def test_a_chain_is_no_longer_than_asked_for_or_of_use() -> None:
    texts, drafter = DraftSequences(None), ngrams(6)
    taught(texts, drafter, 1, (*LONG, *LONG[:2]), limit=4)
    assert chain(texts, drafter, 1) == list(LONG[2:4]), "two may still be written behind the root's follower"
    taught(texts, drafter, 2, (*LONG, *LONG[:2]), limit=100)
    assert chain(texts, drafter, 2, levels=3) == list(LONG[2:5])
    assert chain(texts, drafter, 2) == list(LONG[2:8])


def test_a_fork_finds_the_tokens_of_its_prefix_and_does_not_change_the_prefix() -> None:
    texts, drafter = DraftSequences(None), ngrams(8)
    drafter.open(texts.open(opening(1, len(LONG), decodes=False)))
    texts.observe([FeatureBatch(1, 0, LONG, None, None)])
    for sequence, own in ((2, (7, 50, 51)), (3, (50, 51, 99, 50, 51))):
        fork = texts.open(opening(sequence, 20, limit=100, fork=(1, len(LONG))))
        drafter.open(fork)
        tell(texts, drafter, sequence, len(LONG), own)
    assert chain(texts, drafter, 2) == [*LONG[2:], 7][:8]
    assert chain(texts, drafter, 3) == [99, 50, 51]
    texts.close(1)
    drafter.close(1)
    tell(texts, drafter, 2, len(LONG) + 2, (51, 52))
    assert chain(texts, drafter, 2)[:3] == [53, 54, 55]


def test_trust_is_learned_in_hindsight() -> None:
    """Suggestions that are never right lose their worth, whether or not they were sent."""
    texts, drafter = DraftSequences(None), ngrams(4)
    taught(texts, drafter, 1, (1, 2, 3, 1, 2), limit=10**6)
    worths: list[float] = []
    for step in range(30):
        text = there(texts.find(1))
        offer = there(drafter.propose([text], 4))
        worths.append(float(np.exp(offer.scores[0, 0])))
        tell(texts, drafter, 1, text.committed, (2, 100 + step, 1, 2))
    assert worths[-1] < 0.2 < worths[0]


def test_what_is_right_gains_trust_as_deep_as_it_was_right() -> None:
    texts, drafter = DraftSequences(None), ngrams(4)
    taught(texts, drafter, 1, (9, 1, 2, 3, 4, 9, 1), limit=10**6)
    for _ in range(40):
        text = there(texts.find(1))
        drafter.propose([text], 4)
        tell(texts, drafter, 1, text.committed, (1, 2, 3, 4, 9, 1))
    text = there(texts.find(1))
    offer = there(drafter.propose([text], 4))
    assert np.all(np.exp(offer.scores[0]) > 0.9)
    assert np.all(np.diff(offer.scores[0]) <= 0)


def test_each_of_several_sequences_gets_its_own_draft() -> None:
    texts, drafter = DraftSequences(None), ngrams(8)
    taught(texts, drafter, 1, (1, 2, 3, 4, 1, 2), limit=100)
    taught(texts, drafter, 2, (1, 2, 3), limit=100)
    found = [texts.find(1), texts.find(2)]
    offer = there(drafter.propose([text for text in found if text], 8))
    assert np.isfinite(offer.scores).sum(1).tolist() == [4, 0]


@pytest.mark.parametrize(
    ("own", "past", "nodes", "paths"),
    [
        ([1, 2, 3, 1, 2], [], 8, {(3,): 1.0, (3, 1): 1.0, (3, 1, 2): 1.0}),
        ([7, 1], [1, 5, BREAK, 1, 5, BREAK, 1, 6], 8, {(5,): 2 / 3, (6,): 1 / 3}),
        ([7, 1], [7, 1, 5, BREAK, 1, 6], 8, {(5,): 0.8, (6,): 0.2}),
        ([7, 1], [1, 5, 4, BREAK, 1, 5, 4, BREAK, 1, 6, 4], 2, {(5,): 2 / 3, (5, 4): 2 / 3}),
        ([1, 5, 1], [1, 6], 8, {(5,): 0.5, (6,): 0.5, (5, 1): 0.5}),
        ([1, 2], [1, BREAK, 2], 8, {}),
        ([1], [], 8, {}),
    ],
    ids=[
        "itself", "counts", "more that agrees counts more", "the likeliest", "both", "no text goes on", "one",
    ],
)  # fmt: skip
def test_what_followed_becomes_a_tree_with_the_shares_of_its_places(
    own: list[int], past: list[int], nodes: int, paths: dict[tuple[int, ...], float]
) -> None:
    texts = [np.array(text, np.int32) for text in (own, [*past, BREAK] if past else [])]
    tree = grow_suffixes(texts, 4, nodes, max_places=8, min_match=1)
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents):
        found.append((*found[parent], token))
    assert dict(zip(found[1:], np.exp(tree.scores))) == pytest.approx(paths)
    assert tree.depths == [len(one) for one in found[1:]]


def test_a_log_keeps_at_least_the_newer_half_of_what_it_may() -> None:
    log, told = SeenTokens(16), list[int]()
    for size in (3, 5, 8, 1, 0, 16, 40, 2, 15):
        more = [len(told) + n for n in range(size)]
        told += more
        log.extend(more)
        assert len(log) == len(log.tokens) <= 16
        assert log.tokens.tolist() == told[len(told) - len(log) :]
        assert len(log) >= min(len(told), 8)


def test_a_finished_sequence_is_drafted_from() -> None:
    texts, drafter = DraftSequences(None), SuffixProposer(SUFFIXES)
    taught(texts, drafter, 1, LONG, limit=100)
    taught(texts, drafter, 2, (7, 50), limit=100)
    assert chain(texts, drafter, 2) == [], "it is not over"
    for one in (1, 1):
        texts.close(one)
        drafter.close(one)
    assert chain(texts, drafter, 2) == list(LONG[1:9])
    taught(texts, drafter, 3, (50, 60, 50), limit=100)
    assert {60, 51} < set(chain(texts, drafter, 3)), "its own text is looked through, too"


def test_what_a_fork_shares_is_kept_once() -> None:
    texts, drafter = DraftSequences(None), SuffixProposer(SUFFIXES)
    drafter.open(texts.open(opening(1, len(LONG), decodes=False)))
    texts.observe([FeatureBatch(1, 0, LONG, None, None)])
    for sequence in (2, 3):
        drafter.open(texts.open(opening(sequence, 20, limit=100, fork=(1, len(LONG)))))
        tell(texts, drafter, sequence, len(LONG), (70 + sequence, 80))
    for sequence in (2, 3, 1):
        drafter.close(sequence)
    past = drafter._past.tokens.tolist()
    assert [past.count(token) for token in (50, 72, 73)] == [1, 1, 1]
    assert past.count(59) == 3, "a few tokens in front of each fork lead to what it wrote"


@pytest.mark.parametrize(
    ("min_match", "vocabulary"),
    [(1, range(99)), (2, range(12)), (3, range(6)), (8, range(2)), (2, [1 << bit for bit in range(30)])],
)
def test_a_suggestion_is_looked_for_only_if_the_last_tokens_have_occurred_before(
    min_match: int, vocabulary: Sequence[int]
) -> None:
    """The quick check agrees with the search, whatever was written and however many tokens arrive at once;
    also if a token has the bytes of another one in other places.
    """
    texts = DraftSequences(None)
    drafter = SuffixProposer(SuffixShape(4, 4, min_match=min_match))
    draw = np.random.default_rng(7)
    written = draw.choice(vocabulary, 200).tolist()
    taught(texts, drafter, 1, tuple(written[:9]))
    sequence = there(texts.find(1))
    found = list[bool]()
    for end in range(9, 200, 3):
        sequence.tokens[:] = written[:end]
        candidates = drafter.propose([sequence], 4)
        last = written[end - min_match : end]
        before = [written[at : at + min_match] for at in range(end - min_match)]
        assert (candidates is not None) is (last in before)
        found.append(last in before)
    assert any(found)
    assert not all(found)
