"""One way to draft with the rule that says how much of it pays, and the rest it takes while nothing does.

Refuses to know the ring, and other ways to draft but the one whose candidates may join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specsot.tree import Tree, single
from specsot_drafter.drafters import Drafter
from specsot_drafter.flights import Flight
from specsot_drafter.rules import Rule
from specsot_drafter.selection import Floats, Offer, barred_below, graft, join, masses, trees_of
from specsot_drafter.texts import Text

Clock = Callable[[], float]

UNGROWN = 8  # laps to rest where nothing can grow


@dataclass(slots=True)
class Lane:
    """rest: for how many more trees nothing will be drafted; 0 while it drafts.

    blend: whose chains may join its trees.
    """

    drafter: Drafter
    rule: Rule
    blend: Drafter | None
    clock: Clock
    rest: int = 0
    _slept: int = field(default=0, init=False)

    def plan(self, texts: Sequence[Text]) -> int:
        """Levels to grow for these; 0 begins a rest, or goes on with one."""
        live = [text for text in texts if self.drafter.most_levels(text)]
        if self.rest and not self.sleep(len(texts), len(texts)):
            return 0
        most = max(map(self.drafter.most_levels, live), default=0)
        levels = self.rule.plan_levels(len(live), most, self.drafter.due(live))
        if not levels and self.rule.adapts:  # who drafts always drafts again with the next text
            self.rest = self.rule.rest or UNGROWN * len(texts)
        return levels

    def sleep(self, trees: int, live: int) -> bool:
        """So many trees went without drafts, `live` of them a lap. Returns whether the rest is over."""
        self._slept += trees
        self.rest = max(self.rest - trees, 0)
        if self.rest == 0:
            self.rule.rested(self._slept, live)
            self._slept = 0
        return self.rest == 0

    def grow(self, texts: Sequence[Text], levels: int, rows: int) -> dict[int, Flight]:
        """Trees of at most `rows` rows in all, roots included, for those of the texts that can have one."""
        live = [text for text in texts if self.drafter.most_levels(text)]
        due, began = self.drafter.due(live), self.clock()
        offer = self.drafter.offer(live, levels, self.rule.asks)
        if offer is None:
            return {}
        grown = offer.levels
        self.rule.note_growth(len(live), grown, due, self.clock() - began)
        offer = barred_below(offer, [self.drafter.most_levels(text) for text in live])
        whole, values = self._blended(live, offer)
        chosen = self.rule.choose(values, grown, rows - len(live))
        trees = trees_of(whole, [text.tokens[-1] for text in live], chosen)
        mine = chosen[:, : offer.tokens.shape[1]]
        told = masses(offer, mine).tolist()
        return {
            text.sequence: Flight(text.committed, tree, grown, tuple(mass), 1 + int(own))
            for text, tree, mass, own in zip(live, trees, told, mine.sum(1))
        }

    def _blended(self, texts: Sequence[Text], offer: Offer) -> tuple[Offer, Floats]:
        """The offer, with what the text itself suggests hung into it, and what all of it is worth."""
        values = self.rule.values(offer)
        if self.blend is None or not self.rule.adapts:
            return offer, values
        chains = self.blend.offer(texts, len(self.blend.widths) + 1)
        if chains is None:
            return offer, values
        return join(offer, values, chains, np.exp(chains.scores))


def hang(tree: Tree, forced: Sequence[int], text: Text, slots: int) -> Tree:
    """A tree with what a grammar forces below its root, as far as it is of use and there is room."""
    room = min(text.room - 1, slots - len(tree))
    return graft(tree, forced[: max(room, 0)])


def lone(root: int, forced: Sequence[int], slots: int) -> Tree:
    """What is fed where nothing is grown."""
    return graft(single(root), forced[: slots - 1])
