"""A master's status report on the wire."""

from __future__ import annotations

from specsot.core.info import (
    Info,
    LapsInfo,
    MemberInfo,
    ModelInfo,
    PagesInfo,
    Rebalanced,
    ReplicaInfo,
    RequestsInfo,
)
from specsot.transport.wire.members import KIND_NUMBERS, KINDS, decode_layers, encode_layers
from specsot.transport.wire.values import few, known
from specsot.v1 import master_pb2


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
        laps=encode_laps(info.laps),
        requests=encode_requests(info.requests),
        plan=info.plan,
        replicas=map(encode_replica, info.replicas),
    )


def decode_info(message: master_pb2.GetInfoResponse) -> Info:
    """Raises WireError."""
    return Info(
        models=tuple(map(decode_model, few(message.models, "models"))),
        members=tuple(map(decode_member, few(message.members, "members"))),
        epoch=message.epoch,
        ready=message.ready,
        waiting_for=tuple(few(message.waiting_for, "reasons to wait")),
        pages=decode_pages(message.pages) if message.HasField("pages") else None,
        laps=decode_laps(message.laps) if message.HasField("laps") else None,
        requests=decode_requests(message.requests) if message.HasField("requests") else None,
        version=message.version,
        protocol=message.protocol,
        plan=message.plan,
        replicas=tuple(map(decode_replica, few(message.replicas, "replicas"))),
    )


def encode_replica(one: ReplicaInfo) -> master_pb2.Replica:
    return master_pb2.Replica(
        number=one.number,
        epoch=one.epoch,
        ready=one.ready,
        waiting_for=one.waiting_for,
        pages=encode_pages(one.pages),
        laps=encode_laps(one.laps),
        requests=encode_requests(one.requests),
        plan=one.plan,
    )


def decode_replica(message: master_pb2.Replica) -> ReplicaInfo:
    return ReplicaInfo(
        message.number,
        message.epoch,
        message.ready,
        tuple(few(message.waiting_for, "reasons to wait")),
        decode_pages(message.pages) if message.HasField("pages") else None,
        decode_laps(message.laps) if message.HasField("laps") else None,
        decode_requests(message.requests) if message.HasField("requests") else None,
        message.plan,
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
        host=member.host,
        gpu=member.gpu,
        stands_by=member.stands_by,
        replica=member.replica,
    )


def decode_member(message: master_pb2.Member) -> MemberInfo:
    kind = known(KINDS, message.kind, "kind")
    layers = decode_layers(message.layers) if message.HasField("layers") else None
    return MemberInfo(
        kind,
        message.name,
        message.address,
        message.fingerprint,
        layers,
        message.host,
        message.gpu,
        message.stands_by,
        message.replica if message.HasField("replica") else None,
    )


def encode_pages(pages: PagesInfo | None) -> master_pb2.Pages | None:
    if pages is None:
        return None
    return master_pb2.Pages(total=pages.total, free=pages.free, rows=pages.rows, kept=pages.kept)


def decode_pages(message: master_pb2.Pages) -> PagesInfo:
    return PagesInfo(message.total, message.free, message.rows, message.kept)


def encode_requests(requests: RequestsInfo | None) -> master_pb2.Requests | None:
    if requests is None:
        return None
    return master_pb2.Requests(
        waiting=requests.waiting,
        running=requests.running,
        writing=requests.writing,
        kept=requests.kept,
        refused=requests.refused,
        ended=dict(requests.ended),
        prompt_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
    )


def decode_requests(message: master_pb2.Requests) -> RequestsInfo:
    return RequestsInfo(
        waiting=message.waiting,
        running=message.running,
        writing=message.writing,
        kept=message.kept,
        refused=message.refused,
        ended=tuple(sorted(few(message.ended, "reasons").items())),
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
    )


def encode_laps(laps: LapsInfo | None) -> master_pb2.Laps | None:
    if laps is None:
        return None
    return master_pb2.Laps(
        laps=laps.laps,
        tokens=laps.tokens,
        per_second=laps.per_second,
        tokens_per_lap=laps.tokens_per_lap,
        rows_per_lap=laps.rows_per_lap,
        stages=laps.stages,
    )


def decode_laps(message: master_pb2.Laps) -> LapsInfo:
    return LapsInfo(
        laps=message.laps,
        tokens=message.tokens,
        per_second=message.per_second,
        tokens_per_lap=message.tokens_per_lap,
        rows_per_lap=message.rows_per_lap,
        stages=tuple(few(message.stages, "stages")),
    )


def encode_rebalanced(done: Rebalanced) -> master_pb2.RebalanceResponse:
    return master_pb2.RebalanceResponse(changed=done.changed, epoch=done.epoch, plan=done.plan)


def decode_rebalanced(message: master_pb2.RebalanceResponse) -> Rebalanced:
    return Rebalanced(message.changed, message.epoch, message.plan)
