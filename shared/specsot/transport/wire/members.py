"""Schemas of messages between members and the master: registrations, configurations, orders."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.core.frames import Close, Lease, Open, Result
from specsot.members import (
    Beat,
    Broken,
    Configuration,
    Curve,
    Disband,
    DrafterLost,
    DrafterPlace,
    HandOver,
    MemberLeaving,
    Progress,
    Ready,
    Registration,
    Rejoined,
    RowsOf,
    Stage,
    StandBy,
    TreeShape,
    WeightBytes,
)
from specsot.transport.wire.schema import (
    Enumeration,
    FieldCodec,
    OneOf,
    Schema,
    bounded,
    check_ascending,
    check_duration,
    check_name,
    checked,
    register,
    repeated,
    require,
)
from specsot.transport.wire.values import OPENING, write_result
from specsot.v1 import fleet_pb2, values_pb2

# A message of a member to the master.
Upward = Registration | Ready | Progress | Broken | MemberLeaving | Beat | Result
# A message of the master to a member.
Downward = (
    Configuration
    | Disband
    | StandBy
    | HandOver
    | Rejoined
    | DrafterLost
    | MemberLeaving
    | Beat
    | Open
    | Close
    | Lease
)


def encode_curve(curve: Curve) -> list[values_pb2.Cost]:
    """Return the messages of a curve's points.

    curve: (tokens, seconds), by ascending tokens.
    """
    return [values_pb2.Cost(rows=rows, seconds=seconds) for rows, seconds in curve]


def decode_curve(costs: Sequence[values_pb2.Cost]) -> Curve:
    """Return the curve of a message. Raises WireError unless rows ascend and all seconds are valid.

    costs: the points, at most MAX_PARTS.
    """
    check_ascending([cost.rows for cost in bounded(costs, "points")], "a curve's rows")
    return tuple((cost.rows, check_duration(cost.seconds, "a curve's time")) for cost in costs)


def check_registration(message: fleet_pb2.Registration) -> None:
    """Raise WireError if an epoch is so large that no newer one would fit.

    Epochs are milliseconds since 1970.

    message: the registration before it is decoded.
    """
    require(message.epoch < 1 << 62, f"epoch {message.epoch} is too large")


def check_open(message: fleet_pb2.Open) -> None:
    """Raise WireError unless forked tokens and sent tokens together are the prompt.

    message: the order before it is decoded.

    Returns None if they are. A prompt that is forked as a whole has no sent tokens.
    """
    prompt = message.opening.prompt
    forked = message.opening.fork.length
    num_sent = len(message.tokens)
    require(
        forked + num_sent == prompt,
        f"a prompt of {prompt} tokens has {forked} forked and {num_sent} sent tokens",
    )


def check_rows(message: fleet_pb2.RowsOf) -> None:
    """Raise WireError if a range of rows is empty.

    message: the range before it is decoded.
    """
    require(message.first < message.last, f"the range of rows {message.first}:{message.last} is empty")


# The codecs of a curve, and of a member's name and address.
CURVE = FieldCodec(encode_curve, decode_curve)
MEMBER_NAME, MEMBER_ADDRESS = (
    checked(check_name, "a member's name"),
    checked(check_name, "a member's address"),
)

register(
    Enumeration(fleet_pb2.Layout.DESCRIPTOR),
    Schema(TreeShape, fleet_pb2.TreeShape),
    Schema(WeightBytes, fleet_pb2.WeightBytes),
    Schema(
        Registration,
        fleet_pb2.Registration,
        check_registration,
        name=MEMBER_NAME,
        address=MEMBER_ADDRESS,
        curve=CURVE,
        gpus=repeated(checked(check_name, "a GPU"), "GPUs"),
        rtt=checked(check_duration, "a round trip"),
    ),
    Schema(
        Stage,
        fleet_pb2.Stage,
        name=checked(check_name, "a stage's name"),
        address=checked(check_name, "a stage's address"),
    ),
    Schema(DrafterPlace, fleet_pb2.DrafterPlace, name=MEMBER_NAME, address=MEMBER_ADDRESS),
    Schema(
        Configuration,
        fleet_pb2.Configuration,
        you=MEMBER_NAME,
        draft_timeout=checked(check_duration, "the draft timeout"),
        curve=CURVE,
        transport=Enumeration(fleet_pb2.Transport.DESCRIPTOR).or_unspecified("grpc"),
        comm_mode=Enumeration(fleet_pb2.CommMode.DESCRIPTOR).or_unspecified("p2p"),
        hop_dtype=Enumeration(fleet_pb2.HopDtype.DESCRIPTOR).or_unspecified("auto"),
    ),
    Schema(Ready, fleet_pb2.Ready),
    Schema(Progress, fleet_pb2.Progress),
    Schema(Broken, fleet_pb2.Broken),
    Schema(Disband, fleet_pb2.Disband),
    Schema(StandBy, fleet_pb2.StandBy),
    Schema(RowsOf, fleet_pb2.RowsOf, check_rows),
    Schema(HandOver, fleet_pb2.HandOver),
    Schema(Rejoined, fleet_pb2.Rejoined, address=MEMBER_ADDRESS),
    Schema(DrafterLost, fleet_pb2.DrafterLost, name=MEMBER_NAME),
    Schema(MemberLeaving, fleet_pb2.Leaving),
    Schema(Beat, fleet_pb2.Beat),
    Schema(Open, fleet_pb2.Open, check_open, opening=OPENING),
    Schema(Close, fleet_pb2.Close),
    Schema(Lease, fleet_pb2.Lease),
)

# The messages of members to the master, and those of the master to members.
_UPWARD = OneOf[Upward, fleet_pb2.JoinRequest](
    fleet_pb2.JoinRequest, "message", "a member cannot send the master a"
)
_DOWNWARD = OneOf[Downward, fleet_pb2.JoinResponse](
    fleet_pb2.JoinResponse, "message", "the master cannot send a member a"
)


def encode_upward(message: Upward) -> fleet_pb2.JoinRequest:
    """Return the protobuf message of a value that a member sends to the master. Raises WireError for a value
    of another type.

    message: the value. A result, which every step sends, is written directly into the request, because a
        result's message that is made first would be copied into the request.
    """
    if isinstance(message, Result):
        request = fleet_pb2.JoinRequest()
        write_result(message, request.result)
        return request
    return _UPWARD.encode(message)


decode_upward = _UPWARD.decode
encode_downward = _DOWNWARD.encode
decode_downward = _DOWNWARD.decode
