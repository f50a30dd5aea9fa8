"""Token ids as callers have them (lists, NumPy arrays, tensors, padded or not), and back as they came.

Refuses to know models; a vocabulary is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specsot.errors import InvalidRequest

Rows = list[list[int]]
Ids = Any  # list, or a torch tensor where one was given


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, and what they were given as.

    rows: as given, padding included. prompts: without it. given: the caller's own object.
    """

    rows: Rows
    prompts: tuple[tuple[int, ...], ...]
    given: Any

    def extended(self, written: Sequence[Sequence[int]], pad: int) -> Ids:
        """What was given with what was written behind it; lists for lists.

        A tensor for a tensor: [sequences, longest], on the same device, filled up with `pad`. What was
        written begins in the same column of every row.
        """
        rows = [[*row, *tokens] for row, tokens in zip(self.rows, written)]
        longest, single = max(map(len, rows)), not _is_nested(self.given)
        if hasattr(self.given, "new_tensor"):
            rows = [row + [pad] * (longest - len(row)) for row in rows]
            return self.given.new_tensor(rows[0] if single else rows)
        return rows[0] if single else rows


def read_batch(input_ids: Any, attention_mask: Any, vocabulary: int) -> Batch:
    """One prompt ([tokens]) or several ([sequences, tokens], or lists of any lengths).

    attention_mask: of the same shape; 0 marks padding. Raises InvalidRequest naming the sequence.
    """
    rows = _rows(input_ids, "input_ids")
    seen = [[1] * len(row) for row in rows]
    masks = seen if attention_mask is None else _rows(attention_mask, "attention_mask")
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise InvalidRequest("attention_mask must have the shape of input_ids", "attention_mask")
    prompts = tuple(tuple(token for token, seen in zip(row, mask) if seen) for row, mask in zip(rows, masks))
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(f"input_ids[{number}] is empty", "input_ids")
        if not all(0 <= token < vocabulary for token in prompt):
            raise InvalidRequest(
                f"input_ids[{number}] must hold ids in [0, {vocabulary}), got {min(prompt)} .. {max(prompt)}",
                "input_ids",
            )
    return Batch(rows, prompts, input_ids)


def _rows(given: Any, name: str) -> Rows:
    nested = _plain(given)
    rows = nested if _is_nested(nested) else [nested]
    whole = all(isinstance(row, list) and all(isinstance(value, int) for value in row) for row in rows)
    if not rows or not whole:
        raise InvalidRequest(f"{name} must be token ids, or several sequences of them", name)
    return [[int(value) for value in row] for row in rows]


def _is_nested(given: Any) -> bool:
    """Whether there are several sequences in it."""
    plain = _plain(given)
    return isinstance(plain, list) and any(isinstance(each, list) for each in plain)


def _plain(given: Any) -> Any:
    """Lists of numbers out of tensors, arrays, tuples, and lists of these."""
    if hasattr(given, "tolist"):
        return given.tolist()
    return [_plain(each) for each in given] if isinstance(given, list | tuple) else given
