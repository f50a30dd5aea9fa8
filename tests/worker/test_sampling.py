"""Target tokens of rows: argmax, cuts, penalties, draws, and the distribution really drawn from.

The exact distribution comes from Transformers' own processors, in the order of its generate.
"""

import pytest
import torch

from specsot.params import Sampling
from specsot_worker.penalties import apply_penalties
from specsot_worker.sampling import DrawRequest, choose_tokens, sampling_weights
from tests.conftest import some
from tests.exact import distribute

DRAWS = 20_000
TIMES = {3: 0, 5: 1, 9: 4, 17: 2, 20: 0, 31: 1}  # 3 and 20 stand in the prompt alone
BIAS = ((2, 1.5), (9, -3.0), (17, 0.25), (38, 100.0))
PROCESSORS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.5, min_p=0.2),
    dict(temperature=0.8, top_p=0.9, top_k=6),
    dict(temperature=1.0, repetition_penalty=1.8),
    dict(temperature=1.0, repetition_penalty=0.6),
    dict(temperature=1.0, presence_penalty=1.2),
    dict(temperature=1.0, frequency_penalty=-0.4),
    dict(temperature=2.0, logit_bias=BIAS[:3]),
    dict(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5,
         frequency_penalty=0.2, logit_bias=BIAS[:3]),
]  # fmt: skip


def wish(position=0, seed=11, ordinal=0, **sampling):
    return DrawRequest(Sampling(**sampling), seed, ordinal, position)


def adjusted(logits, sampling, times):
    row = logits.clone()
    apply_penalties(row, sampling, times)
    return row


def chances(logits, sampling):
    """What is drawn from, as dense probabilities [V]."""
    tokens, weights = sampling_weights(logits[None], sampling)
    dense = weights[0].double()
    if tokens is not None:
        dense = torch.zeros(logits.numel(), dtype=torch.float64).scatter_(0, tokens[0], dense)
    return dense / dense.sum()


def chi_square_p(counts, expected):
    """How likely counts at least so far from what is expected are (Pearson's test)."""
    lumped = expected < 5  # the test wants five expected draws in every cell
    seen = torch.cat([counts[~lumped], counts[lumped].sum()[None]])
    want = torch.cat([expected[~lumped], expected[lumped].sum()[None]])
    seen, want = seen[want > 0], want[want > 0]
    statistic = ((seen - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2.0), statistic / 2))


@pytest.mark.parametrize("processors", some(PROCESSORS, 0, 3, 6, 7, 10), ids=lambda p: "+".join(p))
def test_law_2_the_sampled_distribution_is_the_targets(processors):
    sampling = Sampling(**processors)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 1.5
    want = distribute(logits, sampling, TIMES)
    rows = adjusted(logits, sampling, TIMES).expand(DRAWS, -1)
    chosen = choose_tokens(rows, [wish(position, **processors) for position in range(DRAWS)])
    counts = torch.bincount(torch.tensor(chosen), minlength=40).double()
    assert counts[want == 0].sum() == 0
    assert chi_square_p(counts, want * DRAWS) > 1e-5


def test_the_test_itself_notices_a_wrong_distribution():
    want = distribute(torch.randn(40, generator=torch.Generator().manual_seed(5)), Sampling(1.0), {})
    drawn = torch.bincount(
        torch.multinomial(want, DRAWS, replacement=True, generator=torch.Generator().manual_seed(1)),
        minlength=40,
    ).double()
    assert chi_square_p(drawn, want * DRAWS) > 1e-5
    skewed = want.pow(1.05) / want.pow(1.05).sum()
    assert chi_square_p(drawn, skewed * DRAWS) < 1e-5


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 60.0], ids=lambda s: f"spread{s}")
@pytest.mark.parametrize(
    "processors",
    [
        dict(temperature=0.9),
        dict(temperature=0.9, top_p=0.3),
        dict(temperature=0.9, top_p=0.95),
        dict(temperature=0.9, top_p=0.9999),
        dict(temperature=0.9, top_p=1e-9),
        dict(temperature=0.9, top_k=1),
        dict(temperature=0.9, top_k=50),
        dict(temperature=0.9, top_k=4999),
        dict(temperature=0.9, top_k=10**6),
        dict(temperature=0.9, min_p=0.3),
        dict(temperature=0.9, min_p=1.0),
        dict(temperature=0.9, top_k=700, top_p=0.7, min_p=0.001),
    ],
    ids=lambda p: "+".join(f"{k}{v:g}" for k, v in p.items()),
)
def test_cuts_keep_what_they_say_in_vocabularies_of_any_shape(processors, spread):
    """Flat ones, where much must be looked at, and peaked ones, where most weights underflow."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(7)) * spread
    sampling = Sampling(**processors)
    assert torch.allclose(chances(logits, sampling), distribute(logits, sampling, {}), atol=1e-6)


def test_top_k_and_top_p_keep_what_they_say():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert chances(logits, Sampling(1.0, top_k=2)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert chances(logits, Sampling(1.0, top_p=0.499)).tolist() == pytest.approx([1, 0, 0, 0])
    assert chances(logits, Sampling(1.0, top_p=0.51)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert chances(logits, Sampling(1.0, min_p=0.29)).tolist() == pytest.approx(
        [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    )


@pytest.mark.parametrize("cut", [dict(top_k=3), dict(top_p=0.3), dict(top_k=3, top_p=0.9)], ids=str)
def test_ties_at_an_edge_all_stay(cut):
    logits = torch.full((3000,), -9.0)
    logits[[5, 700, 1400, 2100, 2800]] = 1.0
    kept = chances(logits, Sampling(1.0, **cut))
    assert kept.nonzero().flatten().tolist() == [5, 700, 1400, 2100, 2800]


def test_a_row_is_drawn_the_same_alone_and_among_others():
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(4))
    for processors in PROCESSORS:
        sampling = Sampling(**processors)
        together, alone = (
            sampling_weights(logits, sampling)[1][17],
            sampling_weights(logits[17:18], sampling)[1][0],
        )
        assert torch.equal(together[together > 0], alone[alone > 0])


def test_a_draw_depends_on_seed_ordinal_and_position_alone():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    places = [(1, 0, 5), (1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6)]
    drawn = choose_tokens(
        logits.expand(5, -1), [wish(p, seed=s, ordinal=o, temperature=1.0) for s, o, p in places]
    )
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 2


def test_rows_are_chosen_each_by_its_own_wish():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    wishes = [wish(), wish(4, temperature=1.0), wish(), wish(4, temperature=1.0, top_k=1)]
    assert choose_tokens(logits, wishes) == [
        int(logits[0].argmax()),
        *choose_tokens(logits[1:2], wishes[1:2]),
        int(logits[2].argmax()),
        int(logits[3].argmax()),
    ]


def test_rows_that_are_not_numbers_choose_nothing_and_disturb_no_other():
    logits = torch.zeros(3, 4)
    logits[0, 2] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = 1.0
    assert choose_tokens(logits, [wish(temperature=0.5), wish(), wish()]) == [None, None, 3]


@pytest.mark.parametrize("more", [{}, dict(top_k=4), dict(top_p=0.99), dict(min_p=0.5)], ids=str)
def test_masked_tokens_are_never_drawn(more):
    logits = torch.zeros(300, 6)
    logits[:, ::2] = float("-inf")
    drawn = choose_tokens(logits, [wish(position, temperature=2.0, **more) for position in range(300)])
    assert set(drawn) == {1, 3, 5}


@pytest.mark.parametrize("more", [{}, dict(top_p=0.95), dict(min_p=0.001)], ids=str)
def test_last_bits_of_logits_hardly_ever_change_a_draw(more):
    """Steps of other numbers of rows change the last bits of logits. By an inverse CDF, 4 to 9 of these draws
    would differ.
    """
    logits = torch.randn(8192, generator=torch.Generator().manual_seed(9)) * 2
    shaken = logits + torch.linspace(-2e-5, 2e-5, 8192)
    wishes = [wish(position, temperature=1.5, **more) for position in range(500)]
    drawn, again = (choose_tokens(each.expand(500, -1), wishes) for each in (logits, shaken))
    assert sum(one != other for one, other in zip(drawn, again)) <= 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-9, 1e9, 1e300])
def test_temperatures_of_any_size_draw_something(temperature):
    logits = torch.tensor([[-50.0, 30.0, float("-inf"), 29.9]]).expand(200, -1)
    drawn = set(choose_tokens(logits, [wish(position, temperature=temperature) for position in range(200)]))
    assert drawn == ({1} if temperature < 1 else {0, 1, 3})


def test_logits_of_any_type_are_drawn_from():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    wanted = choose_tokens(logits.float(), [wish(temperature=0.7, top_p=0.9)])
    assert choose_tokens(logits, [wish(temperature=0.7, top_p=0.9)]) == wanted
