"""Target tokens: argmax, processors, the inverse CDF, and the distribution it really draws from."""

import pytest

torch = pytest.importorskip("torch")

from specsot.params import Sampling  # noqa: E402
from specsot_worker.sampling import Wish, choose, distribution, draw  # noqa: E402

pytestmark = pytest.mark.torch


def wish(position=0, seed=11, ordinal=0, **sampling):
    return Wish(Sampling(**sampling), seed, ordinal, position)


def chi_square(counts, expected):
    return sum((seen - want) ** 2 / want for seen, want in zip(counts, expected) if want > 0)


@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=5),
        dict(temperature=1.3, top_p=0.8),
        dict(temperature=0.8, top_p=0.9, top_k=6),
    ],
)
def test_law_2_the_sampled_distribution_is_the_targets(sampling):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    want = distribution(logits, Sampling(**sampling))
    draws = 20_000
    counts = torch.zeros(12)
    for position in range(draws):
        counts[draw(logits, wish(position, **sampling))] += 1
    assert counts[want == 0].sum() == 0
    # 11 degrees of freedom at most: 45 is p about 5e-6
    assert chi_square(counts.tolist(), (want * draws).tolist()) < 45


def test_top_k_and_top_p_keep_what_they_say():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert distribution(logits, Sampling(1.0, top_k=2)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert distribution(logits, Sampling(1.0, top_p=0.5)).tolist() == pytest.approx([1, 0, 0, 0])
    assert distribution(logits, Sampling(1.0, top_p=0.51)).tolist() == pytest.approx([0.625, 0.375, 0, 0])


def test_a_draw_depends_on_seed_ordinal_and_position_alone():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    sampled = [
        draw(logits, wish(p, seed=s, ordinal=o, temperature=1.0))
        for s, o, p in [(1, 0, 5), (1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6)]
    ]
    assert sampled[0] == sampled[1]
    assert len(set(sampled)) > 2


def test_rows_are_chosen_each_by_its_own_wish():
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(2))
    wishes = [wish(), wish(4, temperature=1.0), wish()]
    assert choose(logits, wishes) == [
        int(logits[0].argmax()),
        draw(logits[1], wishes[1]),
        int(logits[2].argmax()),
    ]


def test_rows_that_are_not_numbers_choose_nothing_and_disturb_no_other():
    logits = torch.zeros(3, 4)
    logits[0, 2] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = 1.0
    assert choose(logits, [wish(temperature=0.5), wish(), wish()]) == [None, None, 3]


def test_masked_tokens_are_never_drawn():
    logits = torch.zeros(6)
    logits[::2] = float("-inf")
    drawn = {draw(logits, wish(position, temperature=2.0)) for position in range(300)}
    assert drawn == {1, 3, 5}
