"""From a plan's commands to openings: ids, sampling, ends, constraint, forks.

Pure but for the counter of sequence ids. Refuses to know pages, leases and text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from specsot.frames import Fork, Opening
from specsot.params import Ask, HeadWindows, Window
from specsot.skeleton import PlanRules


class SequenceFactory:
    """Makes every opening of a master's life, so that no sequence id comes twice."""

    def __init__(self, end_ids: tuple[int, ...], heads: HeadWindows | None = None) -> None:
        """heads: what was measured for the model's heads, if it was."""
        self._end_ids, self._heads = end_ids, heads
        self._ids: Iterator[int] = itertools.count(1)

    def prefix(
        self, length: int, drafted: bool, fork: Fork | None = None, window: Window | None = None
    ) -> Opening:
        """Prefilled, kept and forked; it never writes."""
        return Opening(next(self._ids), length, fork, decodes=False, drafted=drafted, window=window)

    def writer(
        self,
        prompt: int,
        ask: Ask,
        seed: int,
        *,
        ordinal: int,
        limit: int,
        drafted: bool,
        fork: Fork | None = None,
        family: int | None = None,
        rules: PlanRules | None = None,
        trace: str | None = None,
    ) -> Opening:
        """A sequence that writes up to `limit` tokens. With rules the grammar ends it, else an end token;
        with a form both may. family: its name is that of the first sequence in it.
        """
        id = next(self._ids)
        return Opening(
            sequence=id,
            prompt=prompt,
            fork=fork,
            drafted=drafted,
            sampling=ask.sampling,
            seed=seed,
            ordinal=ordinal,
            stop_ids=() if rules or ask.ignore_eos else self._end_ids,
            limit=limit,
            plan=rules,
            logprobs=ask.logprobs,
            form=None if rules else ask.form,
            family=id if family is None else family,
            drafter=ask.drafter,
            trace=trace,
            window=ask.window,
            pruning=ask.pruning,
            heads=self._heads if ask.head_aware else None,
        )

    def again(
        self, opening: Opening, written: int, *, drafted: bool, fork: Fork | None, family: int | None
    ) -> Opening:
        """The same, for a ring that knows nothing of it. written: how many tokens it has to its name."""
        id = next(self._ids)
        return replace(
            opening,
            sequence=id,
            prompt=opening.prompt - opening.generated + written,
            generated=written,
            drafted=drafted,
            fork=fork,
            family=id if family is None else family,
        )
