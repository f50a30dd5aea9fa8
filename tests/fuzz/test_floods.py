"""Bodies and messages of very many small wrong parts: refused at the first few, not after looking at all.

What is counted is complaints: each one costs memory and time.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specsot.errors import InvalidRequest, WireError
from specsot.params import MAX_BIASES, MAX_MESSAGES
from specsot.transport.wire.carry import CarryReader
from specsot.transport.wire.events import decode_ask
from specsot.transport.wire.schema import MAX_PARTS
from specsot.v1 import master_pb2, ring_pb2, values_pb2
from specsot_master.http.openai_schemas import ChatBody, CompletionBody

MANY = 20_000
HI = [{"role": "user", "content": "Hi"}]
NAMES = {str(number): "wrong" for number in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [1, "", []] * MANY}),
        (CompletionBody, {"prompt": [[{}]] * MANY}),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": NAMES}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": HI * (MAX_MESSAGES + 1)}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": HI, "guided_choice": [1] * MANY}),
        (ChatBody, {"messages": HI, "structured_outputs": NAMES}),
        (ChatBody, {"messages": HI, "specsot": NAMES}),
        (ChatBody, {"messages": HI, "specsot": {"tools": [1] * MANY}}),
    ],
)
def test_a_body_is_refused_at_once(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 10


def test_as_many_as_are_allowed_are_looked_at() -> None:
    bias = {str(number): 1.0 for number in range(MAX_BIASES)}
    body = ChatBody.model_validate({"messages": HI * MAX_MESSAGES, "logit_bias": bias})
    assert (len(body.messages), body.logit_bias) == (MAX_MESSAGES, bias)


MOST_PARTS = [
    ring_pb2.CarryRequest(frame=ring_pb2.Frame(openings=[ring_pb2.Opening()] * (MAX_PARTS + 1))),
    ring_pb2.CarryRequest(frame=ring_pb2.Frame(segments=[ring_pb2.Segment()] * (MAX_PARTS + 1))),
    ring_pb2.CarryRequest(features=ring_pb2.Features(openings=[ring_pb2.Opening()] * (MAX_PARTS + 1))),
    ring_pb2.CarryRequest(
        features=ring_pb2.Features(feature_batches=[ring_pb2.FeatureBatch()] * (MAX_PARTS + 1))
    ),
    ring_pb2.CarryRequest(result=ring_pb2.Result(outcomes=[ring_pb2.Outcome()] * (MAX_PARTS + 1))),
    ring_pb2.CarryRequest(result=ring_pb2.Result(outcomes=[ring_pb2.Outcome(tokens=[1] * (MAX_PARTS + 1))])),
    ring_pb2.CarryRequest(drafts=ring_pb2.Drafts(drafts=[ring_pb2.Draft()] * (MAX_PARTS + 1))),
]


@pytest.mark.parametrize("request_", MOST_PARTS)
def test_a_message_of_very_many_parts(request_: ring_pb2.CarryRequest) -> None:
    with pytest.raises(WireError, match=f"{MAX_PARTS + 1} .* in one message, {MAX_PARTS} are allowed"):
        CarryReader().read(request_)


def test_very_many_biases() -> None:
    bias = dict.fromkeys(range(MANY), 1.0)
    with pytest.raises(InvalidRequest, match="at most 1024 tokens"):
        decode_ask(master_pb2.GenerateRequest(prompt="a", sampling=values_pb2.Sampling(logit_bias=bias)))


def test_a_conversation_of_very_many_turns() -> None:
    turns = [master_pb2.Message()] * (MAX_MESSAGES + 1)
    with pytest.raises(InvalidRequest, match="messages must be at most 4096, got 4097"):
        decode_ask(master_pb2.GenerateRequest(messages=turns))
