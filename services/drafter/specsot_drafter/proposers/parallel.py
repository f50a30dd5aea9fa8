"""Proposes with a P-EAGLE head: masks after a sequence's last row draft all further tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.members import TreeShape
from specsot_drafter.block_graphs import best_of
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import compute_rows
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads.eagle import DraftMask, Eagle3Head
from specsot_drafter.proposers.block import offer_paths
from specsot_drafter.proposers.eagle import EagleProposer


class ParallelProposer(EagleProposer):
    """Proposer that drafts several tokens with a P-EAGLE head in one forward pass.

    A mask is computed like any other row of the sequence, in the slot after the last row. True rows overwrite
    it later.
    """

    def __init__(
        self, head: Eagle3Head, mask: DraftMask, shape: TreeShape, pages: int, page_rows: int
    ) -> None:
        """Allocate the KV pages.

        head: The P-EAGLE head.
        mask: What is fed in place of unknown tokens.
        shape: The largest tree; `top_k` is the number of tokens of every place that a tree may contain.
        pages: Number of KV pages.
        page_rows: Number of KV slots of a page.
        """
        super().__init__(head, shape, pages, page_rows)
        self._grown = mask.levels(shape.depth + 1) - 1
        self._mask = mask
        self.widths = (0,) * self._grown

    def _grow(
        self, growing: Sequence[tuple[DraftSequence, TreeRoom]], levels: int, keep: KeepGrowing | None
    ) -> Candidates:
        """Draft all levels in one pass over the due rows and the masks. Return the candidates.

        growing: The sequences, each with the reserved rows of its tree.
        levels: Maximum number of levels.
        keep: Not called, since one pass drafts all levels. It may be None.

        Due tokens [t4 t5] and 3 levels -> tokens [t4 t5 m m], the last 3 rows asked: t5 drafts the first
        level, each mask one more.

        At most as many levels are drafted as the mask allows. Candidates that a grammar forbids are barred.
        """
        own, rooms = zip(*growing)
        levels = min(levels, self._grown + 1)
        masks = (self._mask.token,) * (levels - 1)
        due = self._take_due([self._followed[sequence.id] for sequence in own])
        asked = [one._replace(tokens=one.tokens + masks, asked=levels) for one in due[: len(own)]]
        due = [*asked, *due[len(own) :]]
        slots = [slot for room in rooms for slot in room.slots[: len(masks)]]
        if slots:
            self._pages.store_features(slots, self._mask.feature.expand(len(slots), -1))
        outputs = compute_rows(self._head, self._pages, due).view(len(rooms), levels, -1)
        return offer_paths(best_of(self._head, outputs, self._top_k), levels, self._max_nodes, own)
