"""Defines the inputs of `Eagle`: its configuration, and token ids as lists, arrays or tensors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specsot.errors import InvalidRequest
from specsot.members import TreeShape
from specsot.params import Sampling
from specsot_bench.core.kernel_errors import as_invalid_request
from specsot_kernels.contract import TreeMaskMode, check_mode, check_nodes


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Configuration of `Eagle`. Raises InvalidRequest, whose `field` names the impossible value.

    topk: Candidates below each drafted node, and nodes of a level that are drafted from.
    num_steps: Levels of drafting, so that at most so many drafts are accepted at once.
    num_draft_tokens: Nodes of a tree, the root included; the target verifies so many tokens at once.
    temperature: Temperature of the sampling; 0 takes the most likely token.
    top_p, top_k, min_p: Cuts that apply above temperature 0; None means no cut.
    tree_mask_mode: Layout of the attention mask of the trees that `Eagle.propose` returns.
    """

    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int = 8
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    tree_mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK

    def __post_init__(self) -> None:
        """Check every value.

        The three sizes must be integers (no bool): `topk` and `num_steps` at least 1, `num_draft_tokens` at
        least 2, and at most 1 plus the number of candidates that `topk` and `num_steps` offer. Mask mode and
        sampling are checked after them.

        Raises InvalidRequest that names the first impossible value.
        """
        for name in ("topk", "num_steps", "num_draft_tokens"):
            value = getattr(self, name)
            minimum = 2 if name == "num_draft_tokens" else 1
            if type(value) is not int or value < minimum:
                raise InvalidRequest(f"{name} must be an integer >= {minimum}, got {value!r}", name)
        with as_invalid_request():
            check_nodes(self.topk, self.num_steps, self.num_draft_tokens)
            check_mode(self.tree_mask_mode, self.num_draft_tokens)
        _ = self.sampling

    @property
    def shape(self) -> TreeShape:
        """Return the same tree in the drafter's terms, which count expansions after the first level."""
        return TreeShape(self.num_steps - 1, self.topk, self.num_draft_tokens, fixed=True)

    @property
    def sampling(self) -> Sampling:
        """Return the sampling options; None, which means no cut, becomes the value that cuts nothing."""
        return Sampling(
            self.temperature, 1.0 if self.top_p is None else self.top_p, self.top_k or 0, self.min_p or 0.0
        )


# Token ids of several sequences.
Rows = list[list[int]]
# A list, or a torch tensor if one was given.
Ids = Any


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, and the form in which they were given.

    rows: Token ids as given, padding included.
    prompts: Token ids without padding.
    given: The caller's own object, whose type the result has.
    """

    rows: Rows
    prompts: tuple[tuple[int, ...], ...]
    given: Any

    def extended(self, new_tokens: Sequence[Sequence[int]], pad_token: int) -> Ids:
        """Return the prompts followed by the written tokens, in the type of the caller's input: a list for
        lists, a single sequence for a single one.

        For a tensor, return a tensor [num_sequences, longest], or [longest] for a single sequence, on the
        same device, filled with `pad_token`. What was written begins in the same column of every row.

        Lists are not padded.

        new_tokens: Token ids that each sequence wrote.
        pad_token: Token id with which shorter rows of a tensor are filled.
        """
        rows = [[*row, *tokens] for row, tokens in zip(self.rows, new_tokens)]
        longest = max(map(len, rows))
        is_single = not _is_nested(self.given)
        if hasattr(self.given, "new_tensor"):
            rows = [row + [pad_token] * (longest - len(row)) for row in rows]
            return self.given.new_tensor(rows[0] if is_single else rows)
        return rows[0] if is_single else rows


def read_batch(input_ids: Any, attention_mask: Any, vocab_size: int) -> Batch:
    """Return one prompt ([num_tokens]) or several ([num_sequences, num_tokens], or lists of any lengths) as a
    batch.

    input_ids [[0, 5, 6], [7, 8, 9]] with attention_mask [[0, 1, 1], [1, 1, 1]] -> prompts (5, 6) and (7, 8,
    9).

    InvalidRequest is also raised if the mask has another shape, or if a value is no integer. Padding may be
    on either side.

    input_ids: Token ids as the caller gave them.
    attention_mask: Mask of the same shape; 0 marks padding; None: nothing is padding.
    vocab_size: Number of token ids of the model; every id must be below it.
    Raises InvalidRequest, naming the sequence that is empty or has an impossible id.
    """
    rows = _rows(input_ids, "input_ids")
    all_ones = [[1] * len(row) for row in rows]
    masks = all_ones if attention_mask is None else _rows(attention_mask, "attention_mask")
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise InvalidRequest("attention_mask must have the shape of input_ids", "attention_mask")
    prompts = tuple(
        tuple(token for token, is_token in zip(row, mask) if is_token) for row, mask in zip(rows, masks)
    )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(f"input_ids[{index}] is empty", "input_ids")
        if not all(0 <= token < vocab_size for token in prompt):
            raise InvalidRequest(
                f"input_ids[{index}] must hold ids in [0, {vocab_size}), got {min(prompt)} .. {max(prompt)}",
                "input_ids",
            )
    return Batch(rows, prompts, input_ids)


def _rows(given: Any, name: str) -> Rows:
    """Return one list of numbers for each sequence.

    An empty list gives one empty sequence. A bool counts as an integer, and becomes 0 or 1.

    given: The argument as the caller gave it: lists, arrays or a tensor, of one or several sequences.
    name: Name of the argument, for the error.
    Raises InvalidRequest for anything but integers, in one or two dimensions.
    """
    nested = _plain(given)
    rows = nested if _is_nested(nested) else [nested]
    all_integers = all(isinstance(row, list) and all(isinstance(value, int) for value in row) for row in rows)
    if not rows or not all_integers:
        raise InvalidRequest(f"{name} must be token ids, or several sequences of them", name)
    return [[int(value) for value in row] for row in rows]


def _is_nested(value: Any) -> bool:
    """Return whether several sequences were given: lists within a list, or a tensor of two dimensions.

    An empty list gives False.

    value: The argument as the caller gave it.
    """
    plain = _plain(value)
    return isinstance(plain, list) and any(isinstance(element, list) for element in plain)


def _plain(value: Any) -> Any:
    """Return lists of numbers for tensors, arrays, tuples, and lists of these; other values are returned as
    they are.

    value: The argument as the caller gave it, or a part of it.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(element) for element in value] if isinstance(value, (list, tuple)) else value
