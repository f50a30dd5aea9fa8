"""The commands and curl lines of the documents: each is read by its command's own options, or asked,
and answered with the fields that stand below it.

grpcurl lines are replayed by tests/contracts/test_grpcurl.py; README's lines and Python by test_readme.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from specsot.service.command import TableCommand
from specsot_app.cli import specsot
from specsot_drafter.config import DrafterConfig
from specsot_master.config import MasterConfig
from specsot_worker.config import WorkerConfig
from tests.conftest import REPOSITORY
from tests.http.house import served
from tests.http.test_thinking import QWEN, Scripted
from tests.master.letters import SAYS

pytestmark = pytest.mark.slow

PAGES = [
    REPOSITORY / "README.md",
    *(REPOSITORY / "docs").rglob("*.md"),
    *REPOSITORY.glob("models/*/README.md"),
]
SERVICES: dict[str, Any] = {
    "specsot-master": MasterConfig,
    "specsot-worker": WorkerConfig,
    "specsot-drafter": DrafterConfig,
}
SAYS_ANYTHING = {**SAYS, "": "It is so."}
QUICKSTART = REPOSITORY / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(specsot(?:-\w+)?) ")
PLACEHOLDER = re.compile(r"\s(\.\.\.|\[--.*)(?=\s|$)")  # "and so on"


def blocks() -> Iterator[tuple[str, str]]:
    for page in sorted(PAGES):
        for block in BLOCK.findall(page.read_text()):
            yield str(page.relative_to(REPOSITORY)), block.replace("\\\n", " ")


def command_lines() -> list[tuple[str, str]]:
    """Of our commands, alone or behind a pipe; not lines that only name one ("specsot-worker: ...")."""
    found = [
        (page, part) for page, block in blocks() for line in block.splitlines() for part in line.split(" | ")
    ]
    lines = [(page, part.strip().removeprefix("$ ")) for page, part in found]
    return list(dict.fromkeys((page, line) for page, line in lines if COMMAND.match(line)))


def curl_lines() -> list[tuple[str, str]]:
    """Each with what stands below it, until the next command."""
    answer = r"((?:\n(?!curl|grpcurl|specsot).*)*)"
    line = rf"^(curl (?:-i )?http://127\.0\.0\.1:8000(?:[^'\n]|'[^']*')*){answer}"
    return [found for _, block in blocks() for found in re.findall(line, block, re.MULTILINE)]


def read_by(line: str) -> click.Context:
    """Raises what the command itself would raise."""
    words = shlex.split(PLACEHOLDER.sub("", line), comments=True)
    words = words[: next((n for n, word in enumerate(words) if word in (">", "&&")), None)]
    while "=" in words[0]:
        words = words[1:]
    program, *words = words
    if program != "specsot":
        return TableCommand(program, SERVICES[program], print, "", switches="values").make_context(
            program, words
        )
    command: click.Command | None = specsot()
    context = None
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context)
        _, command, words = command.resolve_command(context, words)
    assert command is not None
    return command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_a_documented_command_is_understood(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("specsot_lab")
    (tmp_path / "specsot.toml").touch()
    monkeypatch.chdir(tmp_path)
    try:
        read_by(line)
    except click.MissingParameter:
        assert "..." in line, "and more, which is not spelled out"


@pytest.mark.parametrize(
    "line", ["specsot infer --no-such-flag x", "specsot serve --stages two", "specsot nothing"]
)
def test_one_that_is_not_is_an_error(line: str) -> None:
    with pytest.raises(click.UsageError):
        read_by(line)


def keys_of(given: object) -> set[str]:
    if isinstance(given, dict):
        return {str(name) for name in given}.union(*map(keys_of, given.values()))
    return set[str]().union(*map(keys_of, given)) if isinstance(given, list) else set()


@pytest.mark.parametrize(("line", "below"), curl_lines())
async def test_a_documented_call_is_answered_as_documented(line: str, below: str) -> None:
    words = shlex.split(line, comments=True)
    url = next(word for word in words if word.startswith("http://"))
    body = words[words.index("-d") + 1] if "-d" in words else None
    path = url.removeprefix("http://127.0.0.1:8000")
    headers = {"content-type": "application/json"}
    text = {"text": Scripted(QWEN)} if "enable_thinking" in line else {}
    async with served(SAYS_ANYTHING, **text) as house, house.client() as client:
        done = await (client.get(path) if body is None else client.post(path, content=body, headers=headers))
    told = re.search(r"HTTP/1.1 (\d+)", below)
    assert done.status_code == (int(told[1]) if told else 200), done.text
    pieces = [piece for piece in done.text.replace("data: ", "").splitlines() if piece.startswith("{")]
    documented = set(re.findall(r'"(\w+)": ?(?=[\[{"\d.tfn-])', re.sub(r'\\"', "", below)))
    assert documented <= set[str]().union(*(keys_of(json.loads(piece)) for piece in pieces))


async def test_the_quickstarts_client_gets_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", QUICKSTART.read_text(), re.MULTILINE | re.DOTALL)
    async with served(SAYS_ANYTHING) as house:
        snippet = snippet.replace("http://127.0.0.1:8000", house.url)
        await asyncio.to_thread(exec, compile(snippet, "quickstart.md", "exec"), {})
    assert "## 1. Alpha\n" in capsys.readouterr().out


def test_there_are_such_lines() -> None:
    assert len(command_lines()) > 60
    assert len(curl_lines()) >= 17
