"""What one peer says over one link: who it is, what it may say, and whether it left in good order.

Refuses to know transports: it is given requests, one by one, and hears of the end by an exception or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from specsot.core.frames import Frame
from specsot.errors import Refused, WireError
from specsot.links import Inbox, Lost
from specsot.members import MASTER, PROTOCOL
from specsot.rpc.credentials import Role, check_role, names_of
from specsot.v1 import ring_pb2
from specsot.wire.carry import CarryReader
from specsot.wire.checks import named
from specsot.wire.tensors import Beside

ALLOWED_SPEAKERS: dict[
    str, tuple[Role, ...]
] = {  # what those who are no workers may say, by the field of a message
    "drafts": ("drafter", "worker"),  # a worker passes on what came from the drafter
    "tap": ("drafter", "worker"),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who said hello. names: in its certificate, where it must show one."""

    name: str
    epoch: int
    names: frozenset[str] | None


def check_hello(hello: ring_pb2.Hello, context: Any) -> Peer:
    """context: of the call that brought it. Raises WireError, Refused."""
    named(hello.sender, "a sender's name")
    if hello.sender == MASTER:
        raise Refused(f"no peer is named {MASTER}")
    if hello.protocol != PROTOCOL:
        raise Refused(f"{hello.sender} speaks protocol {hello.protocol}, this member {PROTOCOL}")
    names = names_of(context)
    check_role(names, hello.sender, "worker", "drafter")
    return Peer(hello.sender, hello.epoch, names)


Take = Callable[[Peer, Any], Any]


def refuse_rows_elsewhere(peer: Peer, message: Any) -> Any:
    """Raises WireError: some are elsewhere, where nobody knows of any such place."""
    if isinstance(message, Frame) and any(
        isinstance(rows, Beside) for rows in (message.hidden, message.fused)
    ):
        raise WireError(f"frame {message.number} has its rows beside it, where no channel is")
    return message


class Receiver:
    """Puts what a peer says into the inbox, while it is entered; left without goodbye, the peer is lost."""

    def __init__(self, peer: Peer, inbox: Inbox, take: Take = refuse_rows_elsewhere) -> None:
        """take: what to make of a message whose rows are elsewhere."""
        self._peer, self._inbox, self._reader, self._take = peer, inbox, CarryReader(), take
        self.over = False  # it said goodbye

    def hear(self, request: ring_pb2.CarryRequest) -> None:
        """Raises WireError, and Refused for what it may not say."""
        if request.HasField("goodbye"):
            self.over = True
            return
        speakers = ALLOWED_SPEAKERS.get(request.WhichOneof("message") or "", ("worker",))
        check_role(self._peer.names, self._peer.name, *speakers)
        message = self._reader.read(request)
        if message is not None:
            self._inbox.put(self._peer.name, self._take(self._peer, message), self._peer.names)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.over:
            lost = Lost(self._peer.name, _reason(error), self._peer.epoch)
            self._inbox.put(self._peer.name, lost, self._peer.names)


def _reason(error: BaseException | None) -> str:
    match error:
        case WireError():
            return f"it sent what does not decode: {error}"
        case Refused():
            return str(error)
        case _:
            return "its link broke"
