"""What is asked of a judge, what its words say, and how little an endpoint is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specsot.errors import InvalidRequest, Unavailable
from specsot.params import Message
from specsot_lab.eval.judge import has_failed, judge_pair, messages_of, verdict_in, winner_of
from tests.lab.eval.speaker import Referee


def record(mode: str) -> dict[str, Any]:
    about = {"task": "vicuna", "category": "generic", "id": "1", "mode": mode, "questions": ["Why?", "And?"]}
    return about | {"turns": [{"text": f"{mode} 1"}]}


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A is clearer.\n[[A]]", "A"),
        ("[[B]]", "B"),
        ("Both are fine. [[tie]]", "tie"),
        ("[[A]] at first sight. In the end:\n[[A]]", "A"),
        ("Either [[A]] or [[B]]", None),
        ("[[C]]", None),
        ("[[A]] [[C]]", None),
        ("[[a]]", None),
        ("A is better.", None),
        ("I'm sorry, but I can't help with that.", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_strictly(reply: str, verdict: str | None) -> None:
    assert verdict_in(reply) == verdict


@pytest.mark.parametrize(
    ("direct_first", "sot_first", "winner"),
    [
        ("A", "B", "direct"),
        ("B", "A", "sot"),
        ("tie", "tie", "tie"),
        ("A", "A", "tie"),
        ("B", "B", "tie"),
        ("A", "tie", "tie"),
        (None, "A", None),
        ("tie", None, None),
    ],
)
def test_two_orders_make_one_winner(
    direct_first: str | None, sot_first: str | None, winner: str | None
) -> None:
    assert winner_of(direct_first, sot_first) == winner


def test_a_judge_sees_whole_conversations() -> None:
    _, asked = messages_of(["Q1", "Q2"], ["a1", "a2"], ["b1", "b2"])
    assert asked.content.split("\n\n") == [
        f"[{name} {n}]\n{letter}{n}"
        for name, letter in (("Question", "Q"), ("Answer of A", "a"), ("Answer of B", "b"))
        for n in (1, 2)
    ]


@pytest.mark.parametrize(
    ("rule", "winner", "failed"),
    [
        (lambda said: "[[B]]" if said.endswith("sot 1") else "[[A]]", "sot", False),
        (lambda said: "[[A]]" if said.endswith("sot 1") else "[[B]]", "direct", False),
        (lambda _: "[[A]]", "tie", False),
        (lambda _: "I refuse.", None, False),
        (lambda said: None if said.endswith("sot 1") else "[[A]]", None, True),
    ],
    ids=["sot", "direct", "a place", "a refusal", "a failure"],
)
async def test_both_orders_are_asked_and_kept(
    rule: Callable[[str], str | None], winner: str | None, failed: bool
) -> None:
    referee = Referee(rule)
    verdict = await judge_pair(referee, record("direct"), record("sot"))
    assert verdict["winner"] == winner
    assert has_failed(verdict) == failed
    assert [(one["a"], one["prompt"]) for one in verdict["orders"]] == list(
        zip(("direct", "sot"), referee.asked)
    )
    assert "And?" not in referee.asked[0]
    assert [one["reply"] for one in verdict["orders"]] == [rule(one) for one in referee.asked]


class Door:
    """An OpenAI-compatible endpoint that answers from a list, the last entry for ever."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers, self.calls = list(answers), list[Any]()

    async def __call__(self, request: Any) -> Any:
        import httpx2

        self.calls.append(request)
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        quick = {"retry-after-ms": "1"}
        if isinstance(body, str):
            return httpx2.Response(status, text=body, headers=quick)
        return httpx2.Response(status, json=body, headers=quick)

    async def reply(self) -> str:
        import httpx2

        from specsot_lab.eval.judge import JudgeEndpoint

        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        endpoint = JudgeEndpoint("http://judge/v1", "large", "my key", http)
        try:
            return await endpoint.reply([Message("user", "Who?")])
        finally:
            await endpoint.close()


def completion(**message: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"index": 0, "message": {"role": "assistant", **message}}]}


async def test_an_endpoint_is_asked_as_openai_is() -> None:
    import json

    door = Door((503, "busy"), (429, "busy"), completion(content="[[A]]"))
    assert await door.reply() == "[[A]]"
    assert len(door.calls) == 3
    call = door.calls[-1]
    assert (str(call.url), call.headers["authorization"]) == (
        "http://judge/v1/chat/completions",
        "Bearer my key",
    )
    assert json.loads(call.content) == {
        "model": "large",
        "messages": [{"role": "user", "content": "Who?"}],
        "temperature": 0,
    }


async def test_a_refusals_words_are_a_reply() -> None:
    assert await Door(completion(content=None, refusal="I can't.")).reply() == "I can't."


@pytest.mark.parametrize(
    "answer",
    [
        (503, "busy"),
        (400, {"error": {"message": "too long"}}),
        (200, "<html>a login page</html>"),
        (200, {"choices": []}),
        (200, {"choices": None}),
        (200, ["garbage"]),
        completion(content=None),
        completion(content=["[[A]]"]),
    ],
)
async def test_whatever_else_comes_is_a_failure(answer: tuple[int, Any]) -> None:
    door = Door(answer)
    with pytest.raises(Unavailable):
        await door.reply()
    assert len(door.calls) == (4 if answer[0] == 503 else 1)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_endpoint_that_will_never_answer_ends_the_run(status: int) -> None:
    with pytest.raises(InvalidRequest, match=r"the judge: .*no"):
        await Door((status, {"error": {"message": "no"}})).reply()


def test_a_judge_has_an_endpoint_a_name_and_a_key_from_the_environment() -> None:
    from specsot_lab.commands.eval import judge_of

    assert judge_of(None, None, None) is None
    for half in (("http://judge/v1", None), (None, "large")):
        with pytest.raises(InvalidRequest, match="both --judge and --judge-model"):
            judge_of(*half, None)
    judge: Any = judge_of("http://judge/v1", "large", "my key")
    assert (judge.name, judge._client.api_key) == ("large", "my key")
