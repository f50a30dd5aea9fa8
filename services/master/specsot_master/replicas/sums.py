"""What several rings tell of themselves, as the account of one master.

Pure. Refuses to know rings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from specsot.info import Info, LapsInfo, PagesInfo, ReplicaInfo, RequestsInfo


def total_info(parts: Sequence[ReplicaInfo]) -> Info:
    """It is ready as soon as one of them is. Stages are told by each. One alone is the whole."""
    if len(parts) == 1:
        (only,) = parts
        return Info(
            epoch=only.epoch,
            ready=only.ready,
            waiting_for=only.waiting_for,
            pages=only.pages,
            laps=only.laps,
            requests=only.requests,
            plan=only.plan,
        )
    pages = [one.pages for one in parts if one.pages]
    return Info(
        epoch=max(one.epoch for one in parts),
        ready=any(one.ready for one in parts),
        waiting_for=tuple(f"replica {one.number}: {line}" for one in parts for line in one.waiting_for),
        pages=_total_pages(pages) if pages else None,
        laps=_total_laps([one.laps for one in parts if one.laps]),
        requests=_total_requests([one.requests for one in parts if one.requests]),
        plan="; ".join(f"replica {one.number}: {one.plan}" for one in parts if one.plan),
        replicas=tuple(parts),
    )


def _total_pages(parts: Sequence[PagesInfo]) -> PagesInfo:
    total, free, kept = (sum(column) for column in zip(*((one.total, one.free, one.kept) for one in parts)))
    return PagesInfo(total, free, parts[0].rows, kept)


def _total_laps(parts: Sequence[LapsInfo]) -> LapsInfo:
    pace = sum(one.per_second for one in parts)

    def mean(value: Callable[[LapsInfo], float]) -> float:
        """Of one lap, whichever ring's."""
        return sum(value(one) * one.per_second for one in parts) / pace if pace else 0.0

    return LapsInfo(
        laps=sum(one.laps for one in parts),
        tokens=sum(one.tokens for one in parts),
        per_second=pace,
        tokens_per_lap=mean(lambda one: one.tokens_per_lap),
        rows_per_lap=mean(lambda one: one.rows_per_lap),
    )


def _total_requests(parts: Sequence[RequestsInfo]) -> RequestsInfo:
    ended: Counter[str] = Counter()
    for one in parts:
        ended.update(dict(one.ended))
    return RequestsInfo(
        waiting=sum(one.waiting for one in parts),
        running=sum(one.running for one in parts),
        writing=sum(one.writing for one in parts),
        kept=max(one.kept for one in parts),  # requests that are over are kept once, for all rings
        refused=sum(one.refused for one in parts),
        ended=tuple(sorted(ended.items())),
        prompt_tokens=sum(one.prompt_tokens for one in parts),
        cached_tokens=sum(one.cached_tokens for one in parts),
    )
