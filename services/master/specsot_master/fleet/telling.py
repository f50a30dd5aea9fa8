"""What is told of the members: who has joined, and what each runs.

Pure. Refuses to know links and how ranges are shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from specsot.info import MemberInfo
from specsot.members import Range, Registration


def member_infos(
    members: Iterable[Registration], running: Mapping[str, Range], spare: Collection[str]
) -> tuple[MemberInfo, ...]:
    """Everybody, with the layers each runs now or was started with."""
    return tuple(
        MemberInfo(
            one.kind,
            one.name,
            one.address,
            one.fingerprint,
            running.get(one.name, one.layers),
            one.host,
            next(iter(one.gpus), ""),
            one.name in spare,
        )
        for one in members
    )
