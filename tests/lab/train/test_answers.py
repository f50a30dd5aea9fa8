"""What a base writes to questions, in the prompts it has in service, is what its head learns from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from specsot_lab.train.answers import answer_all
from specsot_lab.train.settings import AnswerOptions
from specsot_master.prompts import Prompts
from specsot_master.text import Text


class Scribe:
    """Writes a list wherever a prompt ends with the first number of one."""

    def __init__(self, text: Text, plan: str) -> None:
        self._text, self._plan = text, plan
        self.asked: list[str] = []

    def write(self, prompts: Sequence[Sequence[int]], limit: int, done: object = None) -> list[list[int]]:
        said = [self._text.decode(prompt) for prompt in prompts]
        self.asked += said
        plans = [one.endswith("1.") for one in said]
        return [list(self._text.encode(self._plan if plan else "So it is.")) for plan in plans]


def test_a_base_that_was_not_taught_to_plan_writes_lists_and_each_kept_point(
    demo_model: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / "base" / name, tmp_path / name)
    text = Text(tmp_path)
    scribe = Scribe(text, " The moon\n2. Shape of the coast\n3. the moon.\n")
    asking = AnswerOptions(direct=1, plan_tokens=40, answer_tokens=20)
    rows = answer_all(
        ["What makes tides?"], Prompts(tmp_path, text), text, scribe, asking, lambda *_: lambda _: None
    )
    assert len(rows) == 4, "the list, two points of it, the answer itself"
    headings = [prompt.rpartition("## ")[2].strip() for prompt in scribe.asked if "## " in prompt]
    assert headings == ["1. The moon", "2. Shape of the coast"]
