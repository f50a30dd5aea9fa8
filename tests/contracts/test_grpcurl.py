"""Every grpcurl line of the documents, replayed by a real reflection client against a real master.

The master's ring is a fake that writes one sentence.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest

from tests.conftest import REPOSITORY
from tests.contracts.grpcurl import Line, parse, replay
from tests.endpoints.front import front

pytestmark = pytest.mark.timeout(60)

BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
HIDDEN = (".", "node_modules")
SAYS_ANYTHING = {"": "It is so."}


def documents() -> list[Path]:
    found = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*.md"))
    return [path for path in sorted(found) if not any(part.startswith(HIDDEN) for part in path.parts)]


def lines_of(document: Path) -> list[str]:
    """Its grpcurl lines; those that go on behind a backslash are one."""
    blocks = BLOCK.findall((REPOSITORY / document).read_text())
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"\s*(\$ )?grpcurl ", line)]


ALL = [line for document in documents() for line in lines_of(document)]
LINES = [line for line in ALL if "-cacert" not in line]  # tests/security has a master with certificates


def test_the_documents_have_such_lines() -> None:
    said = sum((REPOSITORY / document).read_text().count("grpcurl -") for document in documents())
    assert len(ALL) == said > 0, "each of them in a block of its own, where a reader can copy it"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize("text", LINES)
async def test_a_documented_line(text: str, version: str) -> None:
    line = parse(text)
    async with front(SAYS_ANYTHING) as one:
        answers = await asyncio.to_thread(replay, line, one.address, version)
    assert answers
    if line.words == ("list",):
        assert {"specsot.v1.Master", "grpc.health.v1.Health"} <= set(answers)
    if line.words[-1].endswith("/Generate"):
        assert [int(answer.get("number", 0)) for answer in answers] == list(range(len(answers)))
        assert answers[-1]["finished"]["text"] == "It is so."


async def test_describing_and_refusals() -> None:
    """What the replay makes of them, so that a line that should fail cannot pass."""
    async with front(SAYS_ANYTHING) as one:

        def ask(*words: str, data: str = "") -> list[object]:
            return replay(Line("", words, plaintext=True, data=data), one.address)

        methods = await asyncio.to_thread(ask, "list", "specsot.v1.Master")
        assert methods == [
            f"specsot.v1.Master.{name}" for name in ("Cancel", "Generate", "GetInfo", "Rebalance")
        ]
        (file,) = await asyncio.to_thread(ask, "describe", "specsot.v1.GenerateRequest")
        assert file.name == "specsot/v1/master.proto"
        with pytest.raises(KeyError):
            await asyncio.to_thread(ask, "describe", "specsot.v1.Nothing")
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(ask, "specsot.v1.Master/Cancel")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
