"""A drafter that knows the text, errs as a published head does, and costs what that head costs.

Refuses to know rings and clocks. The head runs beside for its true cost, on the true features; its candidates
are thrown away, and the known text with mistakes takes their places, scores and all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from specsot.frames import Features
from specsot_app.bench.acceptance import even_runs
from specsot_drafter.drafters.eagle import EagleDrafter
from specsot_drafter.rules import Always
from specsot_drafter.selection import Deserves, Flags, Floats, Ints, Offer, best_each
from specsot_drafter.texts import Text

CHANCES = (0.62, 0.14, 0.07, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.005)  # of a node's children, best first
STEP = 7919  # a prime: far from the right token, and never it


class Replay:
    """See `Drafter`. What an EAGLE head would draft if it were right as often as `chance` says."""

    def __init__(self, inner: EagleDrafter, chance: float, vocabulary: int, k: int) -> None:
        """chance: that a level holds the right token, where the level above did."""
        self.widths, self._inner = inner.widths, inner
        self._vocabulary, self._k = vocabulary, k
        self._runs = even_runs(chance)

    @property
    def free_pages(self) -> int:
        return self._inner.free_pages

    def due(self, texts: Sequence[Text]) -> int:
        return self._inner.due(texts)

    def open(self, text: Text) -> None:
        self._inner.open(text)

    def hear(self, batch: Features) -> None:
        self._inner.hear(batch)

    def close(self, sequence: int) -> None:
        self._inner.close(sequence)

    def most_levels(self, text: Text) -> int:
        return self._inner.most_levels(text)

    def catch_up(self) -> None:
        self._inner.catch_up()

    def offer(self, texts: Sequence[Text], levels: int, deserves: Deserves | None = None) -> Offer | None:
        """The head's own offer, for its time; then the known one."""
        real = self._inner.offer(texts, levels, deserves)
        if real is None:
            return None
        known = grown(self._k, real.levels)
        scores, parents = repeated(self._k, real.levels, len(texts))
        tokens = self._tokens([text.tokens[-1] for text in texts], known)
        return Offer(tokens, scores, parents, known.depths)

    def _tokens(self, roots: Sequence[int], bush: Bush) -> Ints:
        """The right tokens on the first path as far as each one's run goes; wrong ones everywhere else."""
        tokens = np.array(roots)[:, None] + bush.wrong
        for row, root in enumerate(roots):
            right = min(next(self._runs), len(bush.path))
            tokens[row, bush.path[:right]] = range(root + 1, root + 1 + right)
        return tokens % self._vocabulary


@dataclass(frozen=True, slots=True)
class Bush:
    """A tree's candidates without tokens, as `Offer` has them.

    path: the likeliest of each level. wrong: what is added to a root's token to miss every right one.
    """

    scores: Floats
    parents: Ints
    depths: Ints
    wrong: Ints
    path: list[int]


@cache
def grown(k: int, levels: int) -> Bush:
    """As EAGLE-2 grows: the k best of a level have k children each, with CHANCES."""
    chances = np.log(np.array(CHANCES[:k]))
    scores, parents, depths, path = [chances], [np.zeros(k, np.int64)], [np.ones(k, np.int64)], [0]
    fed, first = np.arange(k), 0
    for level in range(1, levels):
        above = scores[-1][fed]
        path.append(first + len(scores[-1]))
        parents.append((first + fed + 1).repeat(k))
        first += len(scores[-1])
        scores.append((above[:, None] + chances).reshape(-1))
        depths.append(np.full(k * k, level + 1))
        fed = np.argsort(-scores[-1], kind="stable")[:k]
    whole, far = np.concatenate(scores), np.concatenate(depths)
    ranks = np.arange(len(whole)) % k
    return Bush(whole, np.concatenate(parents), far, far + STEP * (1 + ranks), path)


@cache
def repeated(k: int, levels: int, texts: int) -> tuple[Floats, Ints]:
    """Scores and parents of the same bush for so many texts; nobody writes into them."""
    known = grown(k, levels)
    return np.tile(known.scores, (texts, 1)), np.tile(known.parents, (texts, 1))


class Shared(Always):
    """Every tree as large as its shape, or as its share of all rows where that is less."""

    def choose(self, values: Floats, levels: int, most: int) -> Flags:
        return best_each(values, min(self._each, most // len(values)))
