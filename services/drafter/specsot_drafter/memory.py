"""What a drafter keeps per position: KV of the head and the base's true feature, in the same pages.

Refuses to know sequences' texts, trees and when anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specsot.core.pages import PageTable
from specsot.model.kv import KVPages, indices, untouched_zeros
from specsot_drafter.growth import TreeRoom, reserve_room
from specsot_drafter.heads import DraftHead


class DraftPages:
    """Draft row j of a sequence lives in slot j of its pages; feature j lives in the same slot.

    features: [slots, hidden].
    """

    def __init__(self, head: DraftHead, pages: int, page_rows: int) -> None:
        self.table = PageTable(pages, page_rows)
        self.kv = KVPages(
            head.layers, pages, page_rows, head.kv_heads, head.head_dim, head.dtype, head.device
        )
        self.features = untouched_zeros((pages * page_rows, head.hidden), head.dtype, head.device)

    def fork(self, sequence: int, source: int, length: int) -> None:
        """Share the first `length - 1` rows, and copy the feature of the row after them.

        That row pairs with a token the source does not have. Raises NotFound, Overloaded.
        """
        copy = self.table.fork(sequence, source, length - 1)
        if copy is not None:
            self.kv.copy_page(copy.source, copy.target, copy.rows)
            self._copy_features(copy.source, copy.target, copy.rows)
        self.table.reserve(sequence, length)
        origin, own = (self.table.slots(owner, length - 1, length)[0] for owner in (source, sequence))
        self.features[own] = self.features[origin]

    def reserve_tree(self, sequence: int, base: int, rows: int) -> TreeRoom | None:
        """Room for `rows` grown rows behind the first `base` ones, or None where there is none."""
        return reserve_room(self.table, sequence, base, rows)

    def trim(self, sequence: int, row: int) -> None:
        """Give back what a window hides from all rows from `row` on. Here a row sees all that is left."""
        self._wipe(self.table.trim(sequence, row))

    def close(self, sequence: int) -> None:
        """Give a sequence's pages back."""
        self._wipe(self.table.close(sequence))

    def _wipe(self, pages: Sequence[int]) -> None:
        """Rows that are not numbers must not reach another sequence."""
        for page in pages:
            self.kv.clear_page(page)

    def store_features(self, slots: Sequence[int], features: Tensor) -> None:
        """Store [rows, hidden] true features at so many slots."""
        self.features[indices(slots, self.features.device)] = features.to(self.features.dtype)

    def load_features(self, slots: Tensor) -> Tensor:
        """The true features [rows, hidden] at these slots."""
        return self.features[slots]

    def _copy_features(self, source: int, target: int, rows: int) -> None:
        size = self.table.page_rows
        self.features[target * size : target * size + rows] = self.features[
            source * size : source * size + rows
        ]
