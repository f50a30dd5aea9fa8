"""Prompts as callers have them, and back as they came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specsot.errors import InvalidRequest
from specsot_bench.core.eagle_inputs import read_batch


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ([1, 2, 3], [(1, 2, 3)]),
        ((1, 2, 3), [(1, 2, 3)]),
        ([[1, 2, 3], [4]], [(1, 2, 3), (4,)]),
        (np.array([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        ([np.int64(5), np.int64(6)], [(5, 6)]),
        (torch.tensor([7, 8]), [(7, 8)]),
        (torch.tensor([[7, 8], [9, 0]], dtype=torch.int32), [(7, 8), (9, 0)]),
        ([torch.tensor([7]), torch.tensor([8, 9])], [(7,), (8, 9)]),
    ],
)
def test_prompts_are_read_from_whatever_holds_them(given: Any, prompts: list[tuple[int, ...]]) -> None:
    assert list(read_batch(given, None, 10).prompts) == prompts


def test_lists_come_back_as_lists() -> None:
    assert read_batch([1, 2], None, 10).extended([[3]], 0) == [1, 2, 3]
    assert read_batch([[1, 2], [5]], None, 10).extended([[3], [6, 7]], 0) == [[1, 2, 3], [5, 6, 7]]
    assert read_batch(np.array([[1, 2]]), None, 10).extended([[3]], 0) == [[1, 2, 3]]


def test_tensors_come_back_as_tensors_padded_after_the_written_tokens() -> None:
    given = torch.tensor([[0, 0, 5], [1, 2, 3]], dtype=torch.int32)
    batch = read_batch(given, torch.tensor([[0, 0, 1], [1, 1, 1]]), 10)
    assert batch.prompts == ((5,), (1, 2, 3))
    ids = batch.extended([[6], [4, 5]], 9)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[0, 0, 5, 6, 9], [1, 2, 3, 4, 5]]
    assert read_batch(torch.tensor([1, 2]), None, 10).extended([[3]], 9).tolist() == [1, 2, 3]


def test_a_mask_may_be_of_bools_and_the_padding_on_any_side() -> None:
    batch = read_batch([[5, 0], [0, 6]], [[True, False], [False, True]], 10)
    assert batch.prompts == ((5,), (6,))


@pytest.mark.parametrize(
    ("given", "mask", "said"),
    [
        ([], None, "input_ids must be token ids, or several sequences of them|input_ids\\[0\\] is empty"),
        ([[1], []], None, r"input_ids\[1\] is empty"),
        ([[1], [10]], None, r"input_ids\[1\] must hold ids in \[0, 10\), got 10 .. 10"),
        ([-1, 2], None, r"input_ids\[0\] must hold ids"),
        ("abc", None, "input_ids must be token ids"),
        ([1.0, 2.0], None, "input_ids must be token ids"),
        (torch.tensor(3), None, "input_ids must be token ids"),
        ([[[1]]], None, "input_ids must be token ids"),
        ([[1], 2], None, "input_ids must be token ids"),
        ([[1, 2]], [[1]], "attention_mask must have the shape"),
        ([[1, 2]], [[0, 0]], r"input_ids\[0\] is empty"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, mask: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_batch(given, mask, 10)
