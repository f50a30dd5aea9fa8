"""Members on the wire: registrations, configurations, and what a member and the master say to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specsot.core.frames import Close, Lease, Open, Result
from specsot.errors import WireError
from specsot.members import (
    Beat,
    Broken,
    CommMode,
    Configuration,
    Curve,
    Disband,
    Head,
    Kind,
    Layout,
    Leaving,
    Progress,
    Range,
    Ready,
    Registration,
    Rejoined,
    Stage,
    StandBy,
    Transport,
    TreeShape,
    WeightBytes,
)
from specsot.transport.wire.values import (
    DRAFTERS,
    ascending,
    chosen,
    decode_close,
    decode_lease,
    decode_open,
    decode_result,
    duration,
    encode_close,
    encode_drafter,
    encode_lease,
    encode_open,
    encode_result,
    few,
    known,
    named,
    require,
)
from specsot.v1 import fleet_pb2, values_pb2

KIND_NUMBERS: dict[Kind, values_pb2.Kind] = {
    "worker": values_pb2.KIND_WORKER,
    "drafter": values_pb2.KIND_DRAFTER,
}
KINDS: dict[int, Kind] = {int(number): kind for kind, number in KIND_NUMBERS.items()}
LAYOUT_NUMBERS: dict[Layout, fleet_pb2.Layout] = {
    "packed": fleet_pb2.LAYOUT_PACKED,
    "batched": fleet_pb2.LAYOUT_BATCHED,
}
LAYOUTS: dict[int, Layout] = {int(number): layout for layout, number in LAYOUT_NUMBERS.items()}
TRANSPORT_NUMBERS: dict[Transport, fleet_pb2.Transport] = {
    "grpc": fleet_pb2.TRANSPORT_GRPC,
    "zmq": fleet_pb2.TRANSPORT_ZMQ,
    "direct": fleet_pb2.TRANSPORT_DIRECT,
}
TRANSPORTS: dict[int, Transport] = {0: "grpc", **{int(n): name for name, n in TRANSPORT_NUMBERS.items()}}
MODE_NUMBERS: dict[CommMode, fleet_pb2.CommMode] = {
    "p2p": fleet_pb2.COMM_MODE_P2P,
    "ring": fleet_pb2.COMM_MODE_RING,
}
MODES: dict[int, CommMode] = {0: "p2p", **{int(n): name for name, n in MODE_NUMBERS.items()}}


def encode_layers(layers: Range | None) -> values_pb2.Layers | None:
    return None if layers is None else values_pb2.Layers(first=layers.first, last=layers.last)


def decode_layers(message: values_pb2.Layers) -> Range:
    require(message.first < message.last, f"layers {message.first}:{message.last} are none")
    return Range(message.first, message.last)


def encode_head(head: Head | None) -> values_pb2.Head | None:
    return None if head is None else values_pb2.Head(taps=head.taps, width=head.width)


def decode_head(message: values_pb2.Head) -> Head:
    return Head(ascending(message.taps, "taps"), message.width)


def encode_curve(curve: Curve) -> list[values_pb2.Cost]:
    return [values_pb2.Cost(rows=rows, seconds=seconds) for rows, seconds in curve]


def decode_curve(costs: Sequence[values_pb2.Cost]) -> Curve:
    ascending([cost.rows for cost in few(costs, "points")], "a curve's rows")
    return tuple((cost.rows, duration(cost.seconds, "a curve's time")) for cost in costs)


def encode_registration(registration: Registration) -> fleet_pb2.Registration:
    return fleet_pb2.Registration(
        kind=KIND_NUMBERS[registration.kind],
        name=registration.name,
        address=registration.address,
        fingerprint=registration.fingerprint,
        model_layers=registration.model_layers,
        max_positions=registration.max_positions,
        kv_bytes=registration.kv_bytes,
        row_bytes=registration.row_bytes,
        layers=encode_layers(registration.layers),
        curve=encode_curve(registration.curve),
        head=encode_head(registration.head),
        protocol=registration.protocol,
        drafters=map(encode_drafter, registration.drafters),
        shape=encode_shape(registration.shape) if registration.shape else None,
        host=registration.host,
        gpus=registration.gpus,
        memory=registration.memory,
        weights=encode_weights(registration.weights),
        rtt=registration.rtt,
        began=registration.began,
        number_bytes=registration.number_bytes,
        quantization=registration.quantization,
        epoch=registration.epoch,
    )


def decode_registration(message: fleet_pb2.Registration) -> Registration:
    return Registration(
        kind=known(KINDS, message.kind, "kind"),
        name=named(message.name, "a member's name"),
        address=named(message.address, "a member's address"),
        fingerprint=message.fingerprint,
        model_layers=message.model_layers,
        max_positions=message.max_positions,
        kv_bytes=message.kv_bytes,
        row_bytes=message.row_bytes,
        layers=decode_layers(message.layers) if message.HasField("layers") else None,
        curve=decode_curve(message.curve),
        head=decode_head(message.head) if message.HasField("head") else None,
        protocol=message.protocol,
        drafters=tuple(known(DRAFTERS, number, "drafter") for number in few(message.drafters, "drafters")),
        shape=decode_shape(message.shape) if message.HasField("shape") else None,
        host=message.host,
        gpus=tuple(named(gpu, "a GPU") for gpu in few(message.gpus, "GPUs")),
        memory=message.memory if message.HasField("memory") else None,
        weights=decode_weights(message.weights) if message.HasField("weights") else None,
        rtt=duration(message.rtt, "a round trip") if message.HasField("rtt") else None,
        began=message.began,
        number_bytes=message.number_bytes,
        quantization=message.quantization,
        epoch=_told(message.epoch),
    )


def _told(epoch: int) -> int:
    """There is room for newer ones: they are milliseconds since 1970."""
    require(epoch < 1 << 62, f"epoch {epoch} is too large")
    return epoch


def encode_weights(weights: WeightBytes | None) -> fleet_pb2.WeightBytes | None:
    if weights is None:
        return None
    return fleet_pb2.WeightBytes(layer=weights.layer, first=weights.first, last=weights.last)


def decode_weights(message: fleet_pb2.WeightBytes) -> WeightBytes:
    return WeightBytes(message.layer, message.first, message.last)


def encode_configuration(configuration: Configuration) -> fleet_pb2.Configuration:
    return fleet_pb2.Configuration(
        epoch=configuration.epoch,
        you=configuration.you,
        stages=map(encode_stage, configuration.stages),
        pages=configuration.pages,
        page_rows=configuration.page_rows,
        slots=configuration.slots,
        rows=configuration.rows,
        flight=configuration.flight,
        layout=LAYOUT_NUMBERS[configuration.layout],
        drafter=configuration.drafter,
        head=encode_head(configuration.head),
        shape=encode_shape(configuration.shape),
        draft_timeout=configuration.draft_timeout,
        curve=encode_curve(configuration.curve),
        transport=TRANSPORT_NUMBERS[configuration.transport],
        comm_mode=MODE_NUMBERS[configuration.comm_mode],
        gpu=configuration.gpu,
    )


def decode_configuration(message: fleet_pb2.Configuration) -> Configuration:
    return Configuration(
        epoch=message.epoch,
        you=named(message.you, "a member's name"),
        stages=tuple(map(decode_stage, few(message.stages, "stages"))),
        pages=message.pages,
        page_rows=message.page_rows,
        slots=message.slots,
        rows=message.rows,
        flight=message.flight,
        layout=known(LAYOUTS, message.layout, "layout"),
        drafter=message.drafter if message.HasField("drafter") else None,
        head=decode_head(message.head) if message.HasField("head") else None,
        shape=decode_shape(message.shape),
        draft_timeout=duration(message.draft_timeout, "the draft timeout"),
        curve=decode_curve(message.curve),
        transport=known(TRANSPORTS, message.transport, "transport"),
        comm_mode=known(MODES, message.comm_mode, "comm mode"),
        gpu=message.gpu if message.HasField("gpu") else None,
    )


def encode_stage(stage: Stage) -> fleet_pb2.Stage:
    return fleet_pb2.Stage(name=stage.name, address=stage.address, layers=encode_layers(stage.layers))


def decode_stage(message: fleet_pb2.Stage) -> Stage:
    name, address = named(message.name, "a stage's name"), named(message.address, "a stage's address")
    return Stage(name, address, decode_layers(message.layers))


def encode_shape(shape: TreeShape) -> fleet_pb2.TreeShape:
    return fleet_pb2.TreeShape(depth=shape.depth, top_k=shape.top_k, nodes=shape.nodes, fixed=shape.fixed)


def decode_shape(message: fleet_pb2.TreeShape) -> TreeShape:
    return TreeShape(message.depth, message.top_k, message.nodes, message.fixed)


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
