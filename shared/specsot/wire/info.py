"""A master's account of itself on the wire.

Refuses to know how it was put together.
"""

from __future__ import annotations

from specsot.info import Info, MemberInfo, ModelInfo, PagesInfo
from specsot.v1 import master_pb2
from specsot.wire.checks import known
from specsot.wire.members import KIND_NUMBERS, KINDS, decode_layers, encode_layers


def encode_info(info: Info) -> master_pb2.GetInfoResponse:
    return master_pb2.GetInfoResponse(
        version=info.version,
        protocol=info.protocol,
        models=map(encode_model, info.models),
        members=map(encode_member, info.members),
        epoch=info.epoch,
        ready=info.ready,
        waiting_for=info.waiting_for,
        pages=encode_pages(info.pages),
    )


def decode_info(message: master_pb2.GetInfoResponse) -> Info:
    """Raises WireError."""
    return Info(
        models=tuple(map(decode_model, message.models)),
        members=tuple(map(decode_member, message.members)),
        epoch=message.epoch,
        ready=message.ready,
        waiting_for=tuple(message.waiting_for),
        pages=decode_pages(message.pages) if message.HasField("pages") else None,
        version=message.version,
        protocol=message.protocol,
    )


def encode_model(model: ModelInfo) -> master_pb2.Model:
    return master_pb2.Model(
        name=model.name,
        fingerprint=model.fingerprint,
        layers=model.layers,
        max_positions=model.max_positions,
    )


def decode_model(message: master_pb2.Model) -> ModelInfo:
    return ModelInfo(message.name, message.fingerprint, message.layers, message.max_positions)


def encode_member(member: MemberInfo) -> master_pb2.Member:
    return master_pb2.Member(
        kind=KIND_NUMBERS[member.kind],
        name=member.name,
        address=member.address,
        fingerprint=member.fingerprint,
        layers=encode_layers(member.layers),
    )


def decode_member(message: master_pb2.Member) -> MemberInfo:
    kind = known(KINDS, message.kind, "kind")
    layers = decode_layers(message.layers) if message.HasField("layers") else None
    return MemberInfo(kind, message.name, message.address, message.fingerprint, layers)


def encode_pages(pages: PagesInfo | None) -> master_pb2.Pages | None:
    return None if pages is None else master_pb2.Pages(total=pages.total, free=pages.free, rows=pages.rows)


def decode_pages(message: master_pb2.Pages) -> PagesInfo:
    return PagesInfo(message.total, message.free, message.rows)
