"""Keeps the features of the newest committed tokens on the last stage's device, for the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.errors import WireError
from specsot_model.kv import indices, untouched_zeros

# Steps. On a GPU, the features of at most this many steps are written together: writing those of one step
# takes the host 0.2 ms, and a step of a small model takes 1.6 ms (H200).
MAX_UNWRITTEN = 16


@dataclass(slots=True)
class StepFeatures:
    """The features that were appended to the ring at once: a selection of the rows of one tensor, mostly the
    features of a step's accepted tokens. They are gathered only if they are asked for, because a drafter on
    the same device has stored most of them already.

    It stands for a tensor in messages to a drafter on the same thread; `gathered` returns the tensor.

    features: Features of all tokens of the step, [num_tokens, width].
    rows: Which rows were appended. None: all.
    """

    features: Tensor
    rows: list[int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the appended features: (their number, width)."""
        return len(self), self.features.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the features."""
        return self.features.device

    def __len__(self) -> int:
        """Return the number of appended features."""
        return self.features.shape[0] if self.rows is None else len(self.rows)

    def rows_at(self, places: Sequence[int]) -> Tensor:
        """Return some of the appended features, [len(places), width]. The others are not gathered.

        places: Indices of the features among the appended ones.
        """
        rows = places if self.rows is None else [self.rows[place] for place in places]
        return self.features.index_select(0, indices(rows, self.features.device))

    def to(self, *form: Any, **named_form: Any) -> Tensor:
        """Return the appended features, converted as `Tensor.to` does.

        form: Arguments of `Tensor.to`.
        named_form: Further arguments.
        """
        return self.gathered().to(*form, **named_form)

    def gathered(self) -> Tensor:
        """Return the appended features, [num_features, width]."""
        if self.rows is not None:
            self.features = self.features.index_select(0, indices(self.rows, self.features.device))
            self.rows = None
        return self.features


class FeatureRing:
    """The features of the last tokens of all sequences together. A new feature overwrites the oldest one.

    Features are numbered in the order in which they were appended; feature number n lies in row n % size.
    The ring knows no sequences: the caller remembers the numbers of their features.

        # size 4, features 0..5 appended -> rows [4 5 2 3], and `oldest` is 2

    appended: How many features were appended so far. It is the number of the next feature.
    oldest: Number of the oldest feature that can be loaded. The newest step's features can all be loaded,
        even if they are more than the ring holds.
    newest: The features that were appended last. They must not be changed.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
        size: int = FEATURE_RING_ROWS,
        unwritten: int | None = None,
    ) -> None:
        """Allocate the ring.

        width: Number of elements of one feature.
        dtype: Type of the elements.
        device: Where the features are kept.
        size: Number of features that the ring holds.
        unwritten: Number of steps whose features are written together. None: MAX_UNWRITTEN on a GPU, else 1.
        """
        on_gpu = torch.device(device).type == "cuda"
        self._max_unwritten = (MAX_UNWRITTEN if on_gpu else 1) if unwritten is None else unwritten
        self._rows = untouched_zeros((size, width), dtype, device)
        # The shape of `_rows`, which torch would make anew at each call.
        self._width = width
        self._size = size
        # Features of the last steps that are not in the ring yet.
        self._unwritten: list[StepFeatures] = []
        # Number of features of all tokens of these steps, which stay in memory.
        self._num_unwritten = 0
        self.newest = StepFeatures(self._rows[:0])
        self.appended = 0
        self.oldest = 0

    def append(self, features: Tensor, rows: list[int] | None = None) -> None:
        """Append features; the first one gets the number `appended`.

        features: [n, width]. Migrated ones may be on another device.
        rows: Which rows of `features` are appended. None: all.

        Raises WireError for features of another width.

        `oldest` moves on if the ring is full. Features may be written later, together with those of the next
        steps; they can be loaded all the same. Appended are the rows in the given order.
        """
        num_features, width = features.shape
        if width != self._width:
            raise WireError(f"received features of {width} numbers, this stage has {self._width}")
        self.newest = StepFeatures(features.to(self._rows), rows)
        self._unwritten.append(self.newest)
        num_appended = len(self.newest)
        self.appended += num_appended
        self._num_unwritten += num_features
        self.oldest = max(self.appended - max(self._size, num_appended), 0)
        if len(self._unwritten) >= self._max_unwritten or self._num_unwritten >= self._size:
            self._write()

    def load(self, numbers: Sequence[int]) -> Tensor:
        """Return features, [len(numbers), width].

        numbers: Numbers of the features, in any order, none of them below `oldest`.

        Loading features older than those that were appended last writes everything that was put off. The
        result may be the appended tensor itself, which must not be changed. `numbers` has at least one
        element.
        """
        first = self.appended - len(self.newest)
        if numbers == [*range(first, self.appended)]:
            return self.newest.gathered()
        device = self._rows.device
        if min(numbers) >= first:
            return self.newest.rows_at([number - first for number in numbers])
        self._write()
        size = self._size
        return self._rows[indices([number % size for number in numbers], device)]

    def _write(self) -> None:
        """Copy the features that were put off into the ring. Nothing happens if there are none.

        With size 4, the features 2..5 are the rows 2, 3, 0 and 1: two copies, one up to the end of the ring.

        Of more features than the ring holds, only the newest are written.
        """
        if not self._unwritten:
            return
        size = self._size
        features = _gather_all(self._unwritten)[-size:]
        self._unwritten = []
        self._num_unwritten = 0
        first = (self.appended - len(features)) % size
        to_end = min(len(features), size - first)
        self._rows[first : first + to_end] = features[:to_end]
        if to_end < len(features):
            self._rows[: len(features) - to_end] = features[to_end:]


def _gather_all(steps: Sequence[StepFeatures]) -> Tensor:
    """Return the appended features of all steps, one after the other, [num_features, width].

    steps: At least one.

        # steps of the rows [a b c] and [d e], of which [0, 2] and [1] were appended -> [a c e]
    """
    if len(steps) == 1:
        return steps[0].gathered()
    whole = torch.cat([one.features for one in steps])
    if all(one.rows is None for one in steps):
        return whole
    firsts = accumulate((one.features.shape[0] for one in steps), initial=0)
    rows = [
        first + row
        for first, one in zip(firsts, steps)
        for row in (range(len(one)) if one.rows is None else one.rows)
    ]
    return whole.index_select(0, indices(rows, whole.device))
