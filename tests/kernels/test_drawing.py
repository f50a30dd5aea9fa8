"""Target tokens by the kernel of a GPU, against the rule in torch."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specsot.params import Sampling
from specsot_worker.sampling import ARGMAX, DrawRequest, argmax_tokens, draw_setting, draw_tokens
from tests.conftest import is_full, some

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.drawing import WIDE, choose_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WISHES: list[dict[str, Any]] = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=1.0, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=0.9, top_p=1e-9),
    dict(temperature=1.5, min_p=0.2),
    dict(temperature=0.8, top_p=0.9, top_k=6),
    dict(temperature=0.9, top_k=10**6),
    dict(temperature=5e-324),
    dict(temperature=1e300, top_p=0.9999),
]


def drawn(logits: Tensor, wishes: list[DrawRequest]) -> list[int | None]:
    return choose_tokens(logits.to(DEVICE), [draw_setting(wish) for wish in wishes])


def by_rule(row: Tensor, wish: DrawRequest) -> int | None:
    (best,) = argmax_tokens(row[None])
    if best is None or wish.sampling.temperature == 0:
        return best
    return draw_tokens(row[None], wish.sampling, [wish.key])[0]


@pytest.mark.parametrize(
    ("dtype", "columns"),
    some(product((torch.float32, torch.bfloat16, torch.float16), (40, WIDE + 301)), 1, 2, 4),
    ids=str,
)
def test_tokens_are_the_rules(dtype: torch.dtype, columns: int) -> None:
    """Rows of NaN, of nothing, and rows half masked are among them."""
    generator = torch.Generator().manual_seed(columns)
    for spread in (0.5, 8.0) if columns <= WIDE or is_full() else (8.0,):
        logits = (torch.randn(len(WISHES), columns, generator=generator) * spread).to(dtype)
        if spread > 1:
            logits[0, 3], logits[1], logits[2, ::2] = float("nan"), float("-inf"), float("-inf")
        wishes = [DrawRequest(Sampling(**one), 5, 1, place) for place, one in enumerate(WISHES)]
        wanted = [by_rule(row, wish) for row, wish in zip(logits, wishes)]
        assert drawn(logits, wishes) == wanted


def test_a_row_is_drawn_the_same_in_any_company() -> None:
    """Behind other rows, in other launches."""
    logits = torch.randn(9, 301, generator=torch.Generator().manual_seed(4))
    wishes = [DrawRequest(Sampling(**one), 3, 0, 7) for one in WISHES[1::2]]
    together = drawn(logits[4:5].expand(len(wishes), -1), wishes)
    assert [drawn(logits[3:6], [ARGMAX, wish, ARGMAX])[1] for wish in wishes] == together


def test_what_weighs_nothing_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.3, 0.1, 0.2, float("-inf")]]).expand(64, -1)
    for more in ({}, {"top_p": 0.9}):
        wishes = [DrawRequest(Sampling(1.0, **more), 3, 0, place) for place in range(64)]
        assert set(drawn(logits, wishes)) == {1, 2, 3}
