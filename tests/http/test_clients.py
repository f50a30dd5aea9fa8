"""Requests that real clients once sent (`make clients`, tests/clients/requests.json), answered again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import page
from tests.http.house import Served, served
from tests.master.letters import SAYS

pytestmark = pytest.mark.timeout(60)

SENT: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "clients" / "requests.json").read_text(encoding="utf-8")
)
ARGUMENTS = '{"city": "Paris", "name": "Paris", "population": 2}'
PLANNED = {name: said for name, said in SAYS.items() if name.startswith("Write")}
SAID = "It is blue."


def said_to(body: Any) -> str:
    """What the model writes, by what it is held to."""
    choice = body.get("tool_choice")
    named = choice.get("type") in ("function", "tool") if isinstance(choice, dict) else False
    if named or "schema" in json.dumps([body.get("response_format"), body.get("text")]):
        return ARGUMENTS
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "any"):
        tool = body["tools"][0]
        name = tool.get("name") or tool["function"]["name"]
        return f'[{{"name": "{name}", "arguments": {ARGUMENTS}}}]'
    return SAID


def heard(text: str, streams: bool) -> str:
    """All texts and arguments of an answer, whichever API's."""
    if not streams:
        return json.dumps(strings_in(json.loads(text)), ensure_ascii=False)
    blocks = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    deltas = [strings_in(json.loads(one)) for one in blocks if one != "[DONE]"]
    return json.dumps("".join("".join(one) for one in deltas), ensure_ascii=False)


def strings_in(told: Any) -> list[str]:
    """Values of fields that hold what was written."""
    if isinstance(told, list):
        return [one for part in told for one in strings_in(part)]
    if not isinstance(told, dict):
        return []
    here = [told[name] for name in WRITTEN if isinstance(told.get(name), str)]
    if isinstance(told.get("input"), dict):
        here.append(json.dumps(told["input"]))
    return here + [one for part in told.values() for one in strings_in(part)]


WRITTEN = ("content", "text", "arguments", "delta", "partial_json")


async def answered(house: Served, sent: dict[str, Any]) -> tuple[int, str]:
    body = sent["body"]
    if body and "model" in body:
        body = body | {"model": body["model"].replace("served", "demo")}
    path = sent["path"].replace("served", "demo")
    async with house.client() as client:
        answer = await client.request(sent["method"], path, json=body, headers=sent["headers"])
    return answer.status_code, answer.text


def test_the_page_keeps_the_lines_of_clients_that_were_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "clients.md")
    page.PAGE.write_text(f"# Clients\n\n{page.BEGIN}{page.END}\nMore.\n")
    page.write([page.Row("b", "chat", "works"), page.Row("a", "chat", "works")], ("a", "b"), "demo, 1 s")
    assert page.asked_digest() == page.digest()
    before = page.PAGE.read_text()
    assert before.index("| a |") < before.index("| b |") < before.index("More.")
    page.write(
        [page.Row("a", "", "not run", "no registry"), page.Row("b", "a|b", "refused", "too long")],
        ("a", "b"),
        None,
    )
    after = page.PAGE.read_text()
    assert [line for line in after.splitlines() if line not in before] == [
        line for line in after.splitlines() if "refused: a/b (too long)" in line
    ]
    assert page.asked_digest() == page.digest()


@pytest.mark.parametrize("client", sorted({one["client"] for one in SENT}))
async def test_what_a_client_sends_is_answered(client: str) -> None:
    says = {**PLANNED, "": SAID}
    async with served(says) as house:
        for sent in (one for one in SENT if one["client"] == client):
            body = sent["body"] or {}
            says[""] = said_to(body)
            status, text = await answered(house, sent)
            assert status == sent["status"], (sent, text)
            asks = {"messages", "input"} & body.keys() and not sent["path"].endswith("count_tokens")
            if status == 200 and asks and not str(body["model"]).endswith(":sot"):
                words = SAID if says[""] == SAID else "Paris"
                assert words in heard(text, bool(body.get("stream"))), (sent, text)
