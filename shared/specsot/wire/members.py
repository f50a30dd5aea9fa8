"""Members on the wire: registrations, configurations, and what they are made of.

Refuses to know streams and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsot.members import (
    CommMode,
    Configuration,
    Curve,
    Head,
    Kind,
    Layout,
    Range,
    Registration,
    Stage,
    Transport,
    TreeShape,
    WeightBytes,
)
from specsot.v1 import fleet_pb2, values_pb2
from specsot.wire.checks import ascending, duration, few, known, named, require
from specsot.wire.values import DRAFTERS, encode_drafter

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
