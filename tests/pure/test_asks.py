"""What looking at a request costs: work is counted in calls, so it is the same on every machine.

Knows nothing of endpoints and rings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from specsot.errors import ContextLengthExceeded, InvalidRequest
from specsot.params import MAX_TOKENS, Ask
from specsot.transport.wire.events import decode_ask
from specsot.v1 import master_pb2
from specsot_master.http.openai_requests import completion_asks
from specsot_master.http.openai_schemas import CompletionBody, refuse_unserved
from specsot_master.http.unknown_fields import UnknownFields

FEW, MANY = 100, 500_000


def calls_of(work: Callable[[], object]) -> int:
    """Functions called meanwhile, of Python and of C; it may end in a refusal."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    except InvalidRequest:
        pass
    finally:
        sys.setprofile(None)
    return calls


WORKS: dict[str, Callable[[int], object]] = {
    "an ask": lambda n: Ask(tokens=(7,) * n, mode="direct"),
    "a body": lambda n: CompletionBody.model_validate({"prompt": [7] * n}),
    "a wrong body": lambda n: completion_asks(body_of([7] * n + [-1]), no_words, MAX_TOKENS),
    "a body that fits": lambda n: completion_asks(body_of([7] * n, n=128), no_words, MAX_TOKENS),
    "one that cannot fit": lambda n: completion_asks(body_of([7] * n, n=128), no_words, 50),
    "unserved fields": lambda n: refuse_unserved(body_of([7], **{f"x{key}": 1 for key in range(n // 10)})),
    "unknown fields": lambda n: UnknownFields().check(
        body_of([7], **{f"x{key}": 1 for key in range(n // 10 + 100)}), {}
    ),
    "a message": lambda n: decode_ask(asked(n)),
    "a message that cannot fit": lambda n: decode_ask(asked(n), 50),
}


def body_of(prompt: Any, **more: Any) -> CompletionBody:
    return CompletionBody.model_construct(None, **{"prompt": prompt, **more})


def asked(tokens: int) -> master_pb2.GenerateRequest:
    return master_pb2.GenerateRequest(tokens=[7] * tokens, mode=master_pb2.MODE_DIRECT)


def no_words(text: str) -> tuple[int, ...]:
    raise AssertionError("nothing is to be encoded")


@pytest.mark.parametrize("name", WORKS)
def test_half_a_million_ids_take_no_more_calls_than_a_hundred(name: str) -> None:
    work = WORKS[name]
    few, many = (calls_of(prepared(work, count)) for count in (FEW, MANY))
    assert many <= few + 50, f"{few} calls for {FEW}, {many} for {MANY}"


def prepared(work: Callable[[int], object], count: int) -> Callable[[], object]:
    return lambda: work(count)


def test_as_many_answers_as_are_wanted_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, check = list[int](), Ask.__post_init__

    def count(ask: Ask) -> None:
        looked.append(1)
        check(ask)

    monkeypatch.setattr(Ask, "__post_init__", count)
    asks = completion_asks(body_of([[1, 2], [3]], n=64, seed=5), no_words, 2048)
    assert (len(asks), len(looked)) == (128, 2)
    assert [ask.seed for ask in asks[:64]] == [ask.seed for ask in asks[64:]] == list(range(5, 69))
    assert {ask.tokens for ask in asks} == {(1, 2), (3,)}


def test_too_many_or_too_long_is_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ask, "__post_init__", lambda _: pytest.fail("an ask was made"))
    with pytest.raises(InvalidRequest, match="130 answers to one call, 128 are allowed"):
        completion_asks(body_of(["a"] * 65, n=2), no_words, 2048)
    with pytest.raises(ContextLengthExceeded, match=r"2016 tokens \(2000 in the prompt, 16 in"):
        completion_asks(body_of([[1], [1] * 2000]), no_words, 2000)
    with pytest.raises(ContextLengthExceeded, match="you sent 600000 characters in the prompt"):
        completion_asks(body_of(["a", "a" * 600_000]), no_words, 2000)


@pytest.mark.parametrize("wrong", [(1, -1), (2**31,), (1, True), (1.0,), ("1",)])
def test_what_is_no_id_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokens must be whole"):
        Ask(tokens=wrong, mode="direct")
