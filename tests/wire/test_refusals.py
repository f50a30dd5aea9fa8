"""What each decoder refuses, and with which words.

Knows nothing of streams.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specsot.core.frames import Drafts, Features, Frame
from specsot.errors import InvalidRequest, WireError
from specsot.members import Tap
from specsot.params import MAX_FORM_BYTES, Ask
from specsot.transport.wire.carry import CarryReader, encode_carry
from specsot.transport.wire.events import (
    INFO,
    MAX_ANSWER_TOKENS,
    decode_ask,
    decode_event,
    encode_ask,
    resumes,
)
from specsot.transport.wire.members import decode_downward, decode_upward
from specsot.transport.wire.schema import parse
from specsot.transport.wire.tensors import PIECE_BYTES, decode_tensor, write_tensor
from specsot.v1 import fleet_pb2, master_pb2, ring_pb2, values_pb2

F32, INT8 = values_pb2.DATA_TYPE_FLOAT32, values_pb2.DATA_TYPE_INT8


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (values_pb2.Tensor(dtype=F32, shape=[2, 3], data=b"\0" * 23), "needs 24 bytes, got 23"),
        (values_pb2.Tensor(dtype=F32, shape=[2**32 - 1] * 4), "bytes, 268435456 are allowed"),
        (values_pb2.Tensor(dtype=F32, shape=[0, 2**32 - 1, 2**32 - 1]), "bytes, 268435456 are allowed"),
        (values_pb2.Tensor(dtype=F32, shape=[1] * 5, data=b"\0" * 4), "5 dimensions, 4 are allowed"),
        (values_pb2.Tensor(shape=[1], data=b"\0" * 4), "tensor type 0 is unknown"),
        (values_pb2.Tensor(dtype=77, shape=[1], data=b"\0" * 4), "tensor type 77 is unknown"),
    ],
)
def test_tensors_are_checked_before_memory_is_taken(message: values_pb2.Tensor, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode_tensor(message)


def encode_tensor(tensor: torch.Tensor) -> values_pb2.Tensor:
    message = values_pb2.Tensor()
    write_tensor(tensor, message)
    return message


def test_a_decoded_tensor_owns_its_memory() -> None:
    message = encode_tensor(torch.ones(2, 2))
    decode_tensor(message).zero_()
    assert torch.equal(decode_tensor(message), torch.ones(2, 2))


def test_a_view_travels_as_what_it_shows() -> None:
    view = torch.arange(12.0).reshape(3, 4).t()[1:3]
    assert torch.equal(decode_tensor(encode_tensor(view)), view)


def carry(**fields: Any) -> ring_pb2.CarryRequest:
    return ring_pb2.CarryRequest(**fields)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (carry(), "CarryRequest has no known field set"),
        (carry(hello=ring_pb2.Hello(sender="w", epoch=1)), "hello is not allowed in CarryRequest"),
        (carry(frame=ring_pb2.Frame(segments=[ring_pb2.Segment()])), "Segment has no known field"),
        (carry(frame=ring_pb2.Frame(seconds=[float("nan")])), "must be seconds >= 0, got nan"),
        (carry(result=ring_pb2.Result(outcomes=[ring_pb2.Outcome(end=9)])), "end 9 is unknown"),
        (carry(result=ring_pb2.Result(outcomes=[ring_pb2.Outcome(accepted=[2, 1])])), "must ascend"),
        (
            carry(
                result=ring_pb2.Result(
                    outcomes=[ring_pb2.Outcome(tokens=[2, 1], chances=[ring_pb2.Chance()])]
                )
            ),
            "2 tokens came with log-probabilities of 1",
        ),
        (
            carry(
                result=ring_pb2.Result(
                    outcomes=[ring_pb2.Outcome(tokens=[2], chances=[ring_pb2.Chance(top_tokens=[1])])]
                )
            ),
            "1 tokens came with 0 logprobs",
        ),
        (
            carry(
                drafts=ring_pb2.Drafts(
                    drafts=[ring_pb2.Draft(tree=values_pb2.Tree(tokens=[1, 2], parents=[0]))]
                )
            ),
            "2 tokens and 1 parents",
        ),
        (
            carry(
                drafts=ring_pb2.Drafts(drafts=[ring_pb2.Draft(tree=values_pb2.Tree(tokens=[1], parents=[1]))])
            ),
            "parents come first",
        ),
        (
            carry(frame=ring_pb2.Frame(openings=[ring_pb2.Opening(sampling=values_pb2.Sampling(top_p=2))])),
            r"top_p must be in \[0, 1\]",
        ),
        (
            carry(
                frame=ring_pb2.Frame(
                    openings=[ring_pb2.Opening(prompt=2, reused=ring_pb2.ReusedKV(tokens=[1, 2]))]
                )
            ),
            "2 rows are reused for a prompt of 2 tokens",
        ),
        (
            carry(frame=ring_pb2.Frame(openings=[ring_pb2.Opening(prompt=1, fork=ring_pb2.Fork(length=2))])),
            "a fork is longer than its prompt",
        ),
        (
            carry(
                features=ring_pb2.Features(
                    feature_batches=[ring_pb2.FeatureBatch(tokens=[1, 2])],
                    rows=values_pb2.Tensor(dtype=F32, shape=[0, 4]),
                )
            ),
            "feature batches of 2 tokens came with 0 rows",
        ),
        (
            carry(frame=ring_pb2.Frame(hidden=values_pb2.Tensor(dtype=F32, shape=[1], data=b"\0" * 4))),
            r"hidden must be \[rows, width\]",
        ),
        (
            carry(frame=ring_pb2.Frame(hidden=values_pb2.Tensor(dtype=INT8, shape=[1, 4], data=b"\0" * 4))),
            r"hidden must be \[rows, width\]",
        ),
        (
            carry(features=ring_pb2.Features(rows=values_pb2.Tensor(dtype=INT8, shape=[0, 1, 4]))),
            "rows must not be in 8 bits",
        ),
    ],
)
def test_the_ring_refuses(request_: ring_pb2.CarryRequest, words: str) -> None:
    with pytest.raises(WireError, match=words):
        CarryReader().read(request_)


@pytest.mark.parametrize(
    ("decode", "message", "words"),
    [
        (decode_upward, fleet_pb2.JoinRequest(), "JoinRequest has no known field set"),
        (
            decode_downward,
            fleet_pb2.JoinResponse(joined=fleet_pb2.Joined()),
            "joined is not allowed in JoinResponse",
        ),
        (decode_upward, fleet_pb2.JoinRequest(register=fleet_pb2.Registration()), "kind 0 is unknown"),
        (
            decode_upward,
            fleet_pb2.JoinRequest(register=fleet_pb2.Registration(kind=values_pb2.KIND_WORKER, name="a\nb")),
            "a member's name must have 1 to 255 printable characters",
        ),
        (
            decode_upward,
            fleet_pb2.JoinRequest(
                register=fleet_pb2.Registration(
                    kind=values_pb2.KIND_WORKER,
                    name="w",
                    address="a:1",
                    layers=values_pb2.Layers(first=4, last=4),
                )
            ),
            "the layer range 4:4 is empty",
        ),
        (
            decode_downward,
            fleet_pb2.JoinResponse(open=fleet_pb2.Open(opening=ring_pb2.Opening(prompt=3), tokens=[1])),
            "a prompt of 3 tokens has 0 forked and 1 sent tokens",
        ),
    ],
)
def test_the_fleet_refuses(decode: Any, message: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode(message)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "x", "messages": [master_pb2.Message(role="user", content="y")]}, "prompt"),
        ({"prompt": "x", "tokens": [1]}, "prompt"),
        ({"tokens": [2**31], "mode": master_pb2.MODE_DIRECT}, "tokens"),
        ({"tokens": [1], "mode": master_pb2.MODE_SOT}, "mode"),
        ({"prompt": "x", "mode": 9}, "mode"),
        ({"prompt": "x", "drafter": 9}, "drafter"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(temperature=-1)}, "temperature"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(temperature=float("inf"))}, "temperature"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(temperature=float("nan"))}, "temperature"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(top_p=-0.01)}, "top_p"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(top_p=1.01)}, "top_p"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(top_p=float("nan"))}, "top_p"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(top_k=-1)}, "top_k"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(min_p=-0.1)}, "min_p"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(min_p=1.1)}, "min_p"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(min_p=float("nan"))}, "min_p"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(repetition_penalty=0)}, "repetition_penalty"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(repetition_penalty=-1)}, "repetition_penalty"),
        (
            {"prompt": "x", "sampling": values_pb2.Sampling(repetition_penalty=float("inf"))},
            "repetition_penalty",
        ),
        ({"prompt": "x", "sampling": values_pb2.Sampling(presence_penalty=2.5)}, "presence_penalty"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(frequency_penalty=-3)}, "frequency_penalty"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(logit_bias={3: 101})}, "logit_bias"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(logit_bias={3: float("nan")})}, "logit_bias"),
        ({"prompt": "x", "sampling": values_pb2.Sampling(logit_bias={2**31: 1})}, "logit_bias"),
        (
            {"prompt": "x", "sampling": values_pb2.Sampling(logit_bias=dict.fromkeys(range(1025), 1))},
            "logit_bias",
        ),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "limits": master_pb2.Limits(max_new_tokens=-5)}, "max_new_tokens"),
        ({"prompt": "x", "limits": master_pb2.Limits(max_parallel=0)}, "max_parallel"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "tools": ["not a name"]}, "tools"),
        ({"prompt": "x", "priority": 11}, "priority"),
        ({"prompt": "x", "form": values_pb2.Form()}, "constraint"),
        ({"prompt": "x", "form": values_pb2.Form(regex="")}, "constraint"),
        ({"prompt": "x", "form": values_pb2.Form(regex="x" * (MAX_FORM_BYTES + 1))}, "constraint"),
        ({"prompt": "x", "form": values_pb2.Form(json_schema="")}, "constraint"),
        ({"prompt": "x", "form": values_pb2.Form(choice=values_pb2.Choice())}, "constraint"),
        ({"prompt": "x", "form": values_pb2.Form(choice=values_pb2.Choice(texts=["a", ""]))}, "constraint"),
        (
            {"prompt": "x", "form": values_pb2.Form(choice=values_pb2.Choice(texts=["a"] * 1025))},
            "constraint",
        ),
        ({"prompt": "x", "form": values_pb2.Form(regex="x"), "mode": master_pb2.MODE_SOT}, "constraint"),
    ],
)
def test_a_request_names_its_wrong_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_ask(master_pb2.GenerateRequest(**fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "resuming"),
    [
        ({"prompt": "x"}, False),
        ({"prompt": "x", "request_id": "r"}, False),
        ({"prompt": "x", "request_id": "r", "resume_from": 1}, True),
        ({"request_id": "r", "resume_from": 1}, True),
        ({"request_id": "r"}, True),
        ({"tokens": [1], "request_id": "r"}, False),
        ({}, False),
    ],
)
def test_which_calls_read_on(fields: dict[str, Any], resuming: bool) -> None:
    assert resumes(master_pb2.GenerateRequest(**fields)) is resuming


def test_reading_on_needs_an_id() -> None:
    with pytest.raises(InvalidRequest, match="resume_from needs a request_id") as caught:
        resumes(master_pb2.GenerateRequest(prompt="x", resume_from=1))
    assert caught.value.field == "request_id"


def test_unset_fields_are_the_defaults() -> None:
    assert decode_ask(master_pb2.GenerateRequest(prompt="x")) == Ask(prompt="x")


def test_a_request_says_all_it_means() -> None:
    """A later change of defaults in the master does not change what an older client asked for."""
    sent = encode_ask(Ask(prompt="x"))
    assert sent.HasField("constraint")
    assert sent.limits.HasField("max_parallel")
    assert not sent.limits.HasField("max_new_tokens")  # 1,024 or what fits: the master knows
    assert sent.sampling.HasField("temperature")


def test_bytes_that_do_not_parse() -> None:
    with pytest.raises(WireError, match=r"not a specsot\.v1\.Hello: 3 bytes"):
        parse(ring_pb2.Hello, b"\xff\xff\xff")


def test_a_tap_is_cut_and_put_together() -> None:
    weight = torch.arange(3 * PIECE_BYTES // 4, dtype=torch.float32).reshape(-1, 1024)
    parts = list(encode_carry(Tap(3, 2, weight)))
    assert len(parts) == 3
    assert all(len(part.tap.part.data) <= PIECE_BYTES for part in parts)
    reader = CarryReader()
    *none, whole = [reader.read(part) for part in parts]
    assert none == [None, None]
    assert isinstance(whole, Tap)
    assert torch.equal(whole.weight, weight)


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 0], [0, 1, 1]])
def test_parts_of_a_tap_out_of_order(order: list[int]) -> None:
    weight = torch.zeros(3 * PIECE_BYTES // 4).reshape(-1, 1024)
    parts = list(encode_carry(Tap(3, 2, weight)))
    reader = CarryReader()
    *before, last = order
    for number in before:
        reader.read(parts[number])
    with pytest.raises(WireError, match="tap of layer 2"):
        reader.read(parts[last])


def test_a_tap_larger_than_any_is_refused_with_its_first_part() -> None:
    part = next(encode_carry(Tap(3, 2, torch.zeros(1, 8))))
    part.tap.rows = 2**32 - 1
    with pytest.raises(WireError, match="are allowed"):
        CarryReader().read(part)


def test_messages_between_the_parts_of_a_tap() -> None:
    weight = torch.zeros(2 * PIECE_BYTES // 4).reshape(-1, 1024)
    first, second = encode_carry(Tap(3, 2, weight))
    reader = CarryReader()
    between = [reader.read(next(encode_carry(m))) for m in (Frame(1, 0), Drafts(1, ()), Features(1, 0))]
    assert reader.read(first) is None
    assert between == [Frame(1, 0), Drafts(1, ()), Features(1, 0)]
    assert isinstance(reader.read(second), Tap)


TOP = master_pb2.TokenLogprobs(top=[master_pb2.Candidate()] * 5000)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (dict(planned=master_pb2.Planned(points=[master_pb2.Point()] * 20_000)), "20000 points"),
        (dict(planned=master_pb2.Planned(points=[master_pb2.Point(needs=[1] * 20_000)])), "20000 needs"),
        (dict(branch_text=master_pb2.BranchText(logprobs=[TOP] * 4)), "20000 candidates"),
        (dict(merged_text=master_pb2.MergedText(logprobs=[master_pb2.TokenLogprobs()] * 20_000)), "logprobs"),
    ],
)
def test_a_master_cannot_make_a_clients_events_large(event: dict[str, Any], words: str) -> None:
    with pytest.raises(WireError, match=rf"{words}.* 16384 are allowed"):
        decode_event(master_pb2.GenerateEvent(**event))


def test_an_answers_tokens_are_counted_before_they_are_kept() -> None:
    finished = master_pb2.Finished(reason=master_pb2.FINISH_REASON_STOP, tokens=bytes(MAX_ANSWER_TOKENS + 1))
    with pytest.raises(WireError, match="1048577 tokens in one answer, 1048576 are allowed"):
        decode_event(master_pb2.GenerateEvent(finished=finished))


@pytest.mark.parametrize(
    "info",
    [
        master_pb2.GetInfoResponse(models=[master_pb2.Model()] * 20_000),
        master_pb2.GetInfoResponse(members=[master_pb2.Member()] * 20_000),
        master_pb2.GetInfoResponse(waiting_for=["rain"] * 20_000),
        master_pb2.GetInfoResponse(steps=master_pb2.Steps(stages=[0.0] * 20_000)),
        master_pb2.GetInfoResponse(requests=master_pb2.Requests(ended={str(n): n for n in range(20_000)})),
    ],
    ids=("models", "members", "waiting_for", "stages", "ended"),
)
def test_a_masters_account_of_itself_is_bounded(info: master_pb2.GetInfoResponse) -> None:
    with pytest.raises(WireError, match=r"20000 .* in one message, 16384 are allowed"):
        INFO.decode(info)
