"""One worker's place in one epoch: which of the ring's jobs are its own, and its links to the rest.

Refuses to know tensors and scheduling.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from specsot.core.frames import Close, Drafts, Frame, Lease, Open, Result
from specsot.errors import Refused
from specsot.members import MASTER, Configuration, Kind, Rejoined, Stage, Tap
from specsot.transport.links import Arrival, Dialer, Link, Lost


@dataclass(frozen=True, slots=True)
class RingLinks:
    """Where this stage sends. None: the receiver is this process itself, or does not exist.

    following: the next stage. sequencer: stage 0, for results. drafter: features. master: results.
    """

    next_stage: Link | None
    sequencer: Link | None
    drafter: Link | None
    master: Link

    @property
    def downstream(self) -> Link | None:
        """The next stage; the ring is closed: behind the last one comes stage 0."""
        return self.next_stage or self.sequencer

    async def close(self) -> None:
        links = (self.next_stage, self.sequencer, self.drafter)
        await asyncio.gather(*(link.close() for link in links if link is not None))


def stage_index(configuration: Configuration) -> int:
    """This worker's number among the stages. Raises Refused when it is none of them."""
    for index, stage in enumerate(configuration.stages):
        if stage.name == configuration.you:
            return index
    raise Refused(f"epoch {configuration.epoch} has no stage for {configuration.you}")


def own_taps(configuration: Configuration, stage: Stage) -> frozenset[int]:
    """Taps this stage fuses: inputs of its own layers, and the last block's output on the last stage."""
    taps = configuration.head.taps if configuration.head and configuration.drafter else ()
    return frozenset(tap for tap in taps if configuration.tapping(tap) == stage)


def may_send(configuration: Configuration, arrival: Arrival) -> bool:
    """It comes from whoever may send such a message to this stage, by its name and by its certificate.

    Who has no name in the configuration drafts, or is nobody.
    """
    index, names = stage_index(configuration), [stage.name for stage in configuration.stages]
    sender = arrival.sender
    if not arrival.of("worker" if sender in names else "drafter" if sender != MASTER else MASTER):
        return False
    match arrival.message:
        case Frame():
            return index > 0 and sender == names[index - 1]
        case Result():
            return sender == names[-1]
        case Drafts() | Tap():  # of the drafter; or they ride along, and the ring is closed
            return sender == names[index - 1] or sender not in (*names, MASTER)
        case Lost(peer):
            return sender in (peer, names[-1])
        case Open() | Close() | Lease() | Rejoined():
            return sender == MASTER
        case _:
            return True


async def connect(configuration: Configuration, dialer: Dialer, uplink: Link) -> RingLinks:
    """Dial whom this stage talks to. Raises Unavailable naming who cannot be reached."""
    index, stages = stage_index(configuration), configuration.stages
    last = index == len(stages) - 1

    async def dial(address: str | None, kind: Kind = "worker") -> Link | None:
        return await dialer.dial(address, configuration.epoch, kind) if address else None

    return RingLinks(
        next_stage=await dial(None if last else stages[index + 1].address),
        sequencer=await dial(stages[0].address if last and index else None),
        drafter=await dial(configuration.drafter if last else None, "drafter"),
        master=uplink,
    )
