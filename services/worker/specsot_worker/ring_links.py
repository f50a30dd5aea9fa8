"""A worker's links in one epoch: its receivers, its permitted senders, and messages that arrive early."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from specsot.core.frames import Close, Drafts, Frame, Lease, Open, Result
from specsot.errors import Refused
from specsot.members import MASTER, Configuration, DrafterLost, Rejoined, Tap
from specsot.transport.links import Arrival, Dialer, Link, Lost, RingLink
from specsot_worker.rounded_rows import RoundedRowsLink


@dataclass(frozen=True, slots=True)
class RingLinks:
    """Links to the members to which this stage sends. None: the receiver is this process itself, or does not
    exist.

    next_stage: Link to the next stage, which receives frames. None on the last stage.
    sequencer: Link to stage 0, which receives results. None except on a last stage that is not stage 0.
    drafters: Links to the drafters, which receive features, by name of the drafter. Empty except on the last
        stage.
    master: Link to the master, over which the event loop sends.
    results: The same link, if it lets the compute thread send results without the event loop. None: the event
        loop sends the results.
    """

    next_stage: RingLink | None
    sequencer: RingLink | None
    drafters: Mapping[str, RingLink]
    master: Link
    results: RingLink | None = None

    @property
    def downstream(self) -> RingLink | None:
        """Link to the next stage of the closed ring: after the last stage comes stage 0. None if this stage
        is the whole ring.
        """
        return self.next_stage or self.sequencer

    async def close(self) -> None:
        """Close every link except the one to the master.

        The links are closed at the same time. Missing links are skipped.
        """
        links = (self.next_stage, self.sequencer, *self.drafters.values())
        await asyncio.gather(*(link.close() for link in links if link is not None))


def stage_index(configuration: Configuration) -> int:
    """Return this worker's index among the stages of an epoch. Raises Refused if there is no stage for it.

    configuration: The epoch as the master has configured it; `you` is this worker's name.

    The index counts from 0, in the order of the ring.
    """
    for index, stage in enumerate(configuration.stages):
        if stage.name == configuration.you:
            return index
    raise Refused(f"epoch {configuration.epoch} has no stage for {configuration.you}")


def may_send(configuration: Configuration, arrival: Arrival) -> bool:
    """Return whether the sender of a message may send it to this stage, by its name and its certificate.
    Return False if the certificate does not allow the role, or if another member sends messages of this kind.

    configuration: The epoch as the master has configured it.
    arrival: The message with its sender.

    A sender whose name is neither a stage's nor the master's must be a drafter. Messages of kinds that no
    rule names may come from any member.

    Frames come from the preceding stage only, and never to stage 0. Results come from the last stage. Drafts
    and taps come from the preceding stage (for stage 0: the last stage) or from a drafter. The report of a
    loss comes from the lost member itself or from the last stage. Orders, and news of drafters, come from
    the master.
    """
    index = stage_index(configuration)
    names = [stage.name for stage in configuration.stages]
    sender = arrival.sender
    if not arrival.may_act_as("worker" if sender in names else "drafter" if sender != MASTER else MASTER):
        return False
    match arrival.message:
        case Frame():
            return index > 0 and sender == names[index - 1]
        case Result():
            return sender == names[-1]
        # They come from the drafter, or from the preceding stage of the closed ring, which forwards them.
        case Drafts() | Tap():
            return sender == names[index - 1] or sender not in (*names, MASTER)
        case Lost(peer):
            return sender in (peer, names[-1])
        case Open() | Close() | Lease() | Rejoined() | DrafterLost():
            return sender == MASTER
        case _:
            return True


async def connect(configuration: Configuration, dialer: Dialer, uplink: Link) -> RingLinks:
    """Connect to every member to which this stage sends, and return the links. Raises Unavailable, which
    names the member that cannot be reached.

    configuration: The epoch as the master has configured it.
    dialer: Opens links.
    uplink: Link to the master, which is open already.

    Raises Refused if the configuration has no stage for this worker. Only the last stage dials drafters, and
    stage 0 if it is not stage 0 itself. The link to the next stage rounds hidden states to 8 bits if the
    configuration says so.
    """
    index = stage_index(configuration)
    stages = configuration.stages
    last = index == len(stages) - 1

    async def dial(address: str | None) -> RingLink | None:
        """Return a link to the member at an address, or None without an address.

        address: Address of the member. None: there is no such member.
        """
        return await dialer.dial(address, configuration.epoch) if address else None

    following = await dial(None if last else stages[index + 1].address)
    short = following is not None and configuration.hop_dtype == "int8"
    return RingLinks(
        next_stage=RoundedRowsLink(following) if short else following,
        sequencer=await dial(stages[0].address if last and index else None),
        drafters={
            place.name: await dialer.dial(place.address, configuration.epoch, "drafter")
            for place in (configuration.drafter_places if last else ())
        },
        master=uplink,
        results=uplink if isinstance(uplink, RingLink) else None,
    )


log = structlog.get_logger()

# Messages. At most this many messages of later epochs are kept; taps may arrive before the epoch's
# Configuration. Untuned.
MAX_FUTURE_EPOCH_MESSAGES = 64
# Bytes. At most this many bytes of tensors in such messages. Untuned.
MAX_FUTURE_EPOCH_BYTES = 1 << 30


class FutureEpochMessages:
    """Store of messages of later epochs, in order of arrival. A message that does not fit is dropped; the
    forming of an epoch has a deadline, so a dropped message cannot block the ring for ever.
    """

    def __init__(
        self, max_arrivals: int = MAX_FUTURE_EPOCH_MESSAGES, max_bytes: int = MAX_FUTURE_EPOCH_BYTES
    ) -> None:
        """Start without messages.

        max_arrivals: Maximum number of messages that are kept.
        max_bytes: Maximum bytes of the tensors in these messages.
        """
        self._max_arrivals = max_arrivals
        self._max_bytes = max_bytes
        self._held: list[tuple[int, Arrival]] = []
        self._bytes = self._past_epoch = 0

    def hold(self, epoch: int, arrival: Arrival) -> None:
        """Keep a message of a later epoch. It is ignored if its epoch has already started or passed, and
        dropped with a warning if there is no room.

        epoch: Number of the message's epoch.
        arrival: The message with its sender.

        There is no room if as many messages are kept as allowed, or if their tensors would take more bytes
        than allowed.
        """
        size = tensor_bytes(arrival.message)
        if epoch <= self._past_epoch:
            return
        if len(self._held) >= self._max_arrivals or self._bytes + size > self._max_bytes:
            log.warning(
                "message dropped: too many messages of later epochs", sender=arrival.sender, epoch=epoch
            )
            return
        self._bytes += size
        self._held.append((epoch, arrival))

    def release(self, epoch: int) -> list[Arrival]:
        """Remove and return the messages of an epoch, in order of arrival; [] if there are none. Messages of
        earlier epochs are dropped.

        epoch: Number of the epoch, which begins now.

        Messages of later epochs stay. From now on, messages of this epoch and earlier ones are ignored by
        `hold`.
        """
        released = [arrival for number, arrival in self._held if number == epoch]
        self._held = [one for one in self._held if one[0] > epoch]
        self._bytes = sum(tensor_bytes(arrival.message) for _, arrival in self._held)
        self._past_epoch = epoch
        return released


def tensor_bytes(message: object) -> int:
    """Return the size of the tensors in a message, in bytes. 0 for a message without tensors.

    message: Any message of the ring.

    Counted are the fields weight, hidden, fused and rows; a value without a size counts 0.
    """
    tensors = (getattr(message, name, None) for name in ("weight", "hidden", "fused", "rows"))
    return sum(int(getattr(tensor, "nbytes", 0)) for tensor in tensors)
