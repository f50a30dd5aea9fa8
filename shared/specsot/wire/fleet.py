"""What a member and the master say to each other, on the wire.

Refuses to know streams and tensors: the master reads this without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specsot.core.frames import Close, Lease, Open, Result
from specsot.errors import WireError
from specsot.members import (
    Beat,
    Broken,
    Configuration,
    Disband,
    Leaving,
    Progress,
    Ready,
    Registration,
    Rejoined,
    StandBy,
)
from specsot.v1 import fleet_pb2
from specsot.wire.checks import chosen, named
from specsot.wire.members import (
    decode_configuration,
    decode_registration,
    encode_configuration,
    encode_registration,
)
from specsot.wire.values import (
    decode_close,
    decode_lease,
    decode_open,
    decode_result,
    encode_close,
    encode_lease,
    encode_open,
    encode_result,
)

Upward = Registration | Ready | Progress | Broken | Leaving | Beat | Result
Downward = Configuration | Disband | StandBy | Rejoined | Leaving | Beat | Open | Close | Lease


def encode_upward(message: Upward) -> fleet_pb2.JoinRequest:
    """From a member to the master."""
    match message:
        case Result():
            return fleet_pb2.JoinRequest(result=encode_result(message))
        case Beat():
            return fleet_pb2.JoinRequest(beat=fleet_pb2.Beat())
        case Ready():
            return fleet_pb2.JoinRequest(ready=fleet_pb2.Ready(epoch=message.epoch))
        case Progress(epoch, done, total):
            progress = fleet_pb2.Progress(epoch=epoch, done=done, total=total)
            return fleet_pb2.JoinRequest(progress=progress)
        case Broken():
            broken = fleet_pb2.Broken(epoch=message.epoch, reason=message.reason)
            return fleet_pb2.JoinRequest(broken=broken)
        case Leaving():
            return fleet_pb2.JoinRequest(leaving=fleet_pb2.Leaving(reason=message.reason))
        case Registration():
            return fleet_pb2.JoinRequest(register=encode_registration(message))
        case _:
            raise WireError(f"a member does not tell the master a {type(message).__name__}")


def encode_downward(message: Downward) -> fleet_pb2.JoinResponse:
    """From the master to a member."""
    match message:
        case Open():
            return fleet_pb2.JoinResponse(open=encode_open(message))
        case Lease():
            return fleet_pb2.JoinResponse(lease=encode_lease(message))
        case Close():
            return fleet_pb2.JoinResponse(close=encode_close(message))
        case Beat():
            return fleet_pb2.JoinResponse(beat=fleet_pb2.Beat())
        case Configuration():
            return fleet_pb2.JoinResponse(configure=encode_configuration(message))
        case Disband():
            disband = fleet_pb2.Disband(epoch=message.epoch, reason=message.reason)
            return fleet_pb2.JoinResponse(disband=disband)
        case StandBy():
            return fleet_pb2.JoinResponse(stand_by=fleet_pb2.StandBy(epoch=message.epoch))
        case Leaving(reason):
            return fleet_pb2.JoinResponse(leaving=fleet_pb2.Leaving(reason=reason))
        case Rejoined(epoch, address):
            return fleet_pb2.JoinResponse(rejoined=fleet_pb2.Rejoined(epoch=epoch, address=address))
        case _:
            raise WireError(f"the master does not tell a member a {type(message).__name__}")


_UPWARD: dict[str, Callable[[Any], Upward]] = {
    "register": decode_registration,
    "ready": lambda message: Ready(message.epoch),
    "progress": lambda message: Progress(message.epoch, message.done, message.total),
    "broken": lambda message: Broken(message.epoch, message.reason),
    "leaving": lambda message: Leaving(message.reason),
    "beat": lambda message: Beat(),
    "result": decode_result,
}
_DOWNWARD: dict[str, Callable[[Any], Downward]] = {
    "configure": decode_configuration,
    "disband": lambda message: Disband(message.epoch, message.reason),
    "stand_by": lambda message: StandBy(message.epoch),
    "rejoined": lambda message: Rejoined(message.epoch, named(message.address, "a member's address")),
    "leaving": lambda message: Leaving(message.reason),
    "beat": lambda message: Beat(),
    "open": decode_open,
    "close": decode_close,
    "lease": decode_lease,
}


def decode_upward(request: fleet_pb2.JoinRequest) -> Upward:
    """Raises WireError."""
    name = chosen(request, "message")
    return _UPWARD[name](getattr(request, name))


def decode_downward(response: fleet_pb2.JoinResponse) -> Downward:
    """Raises WireError, also for a second `joined`."""
    name = chosen(response, "message")
    if name not in _DOWNWARD:
        raise WireError(f"{name} may only come first")
    return _DOWNWARD[name](getattr(response, name))
