"""The page about `specsot.eagle`: its example runs, its table says what the config says, its names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import specsot.eagle
from specsot.eagle import EagleConfig
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.torch

PAGE = (REPOSITORY / "docs" / "python.md").read_text().partition("\n## EAGLE for models in memory\n")[2]
LIGHT = """
import sys
from specsot.eagle import TreeMaskMode, build_tree_structure
heavy = {"torch", "grpc", "transformers", "specsot_app"} & set(sys.modules)
assert not heavy, heavy
"""


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(REPOSITORY)
    exec(compile(example, "docs/python.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert said.count("[PLAN]") >= 2
    assert re.search(r"\d+ forwards for \d+ tokens", said)
    assert "identical            2 of 2 sequences" in said


def test_the_table_says_what_the_config_says() -> None:
    rows = re.findall(r"^\| (`.*?`(?:, `.*?`)*) \| (.*?) \|", PAGE.split("### The tree")[0], re.MULTILINE)
    told = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    said = {one.name: told[one.name].strip("`") for one in fields(EagleConfig)}
    own = EagleConfig()
    assert said == {
        name: "none" if value is None else getattr(value, "name", f"{value:g}")
        for name, value in ((one.name, getattr(own, one.name)) for one in fields(EagleConfig))
    }


def test_every_name_is_there() -> None:
    named = re.findall(
        r"^\| `(\w+)` \|", PAGE.split("### The tree functions")[1].split("\n### ")[0], re.MULTILINE
    )
    assert len(named) == 7
    for name in (*named, *specsot.eagle.__all__):
        assert getattr(specsot.eagle, name)
    with pytest.raises(AttributeError, match="no attribute 'Egale'"):
        _ = specsot.eagle.Egale


def test_the_tree_functions_do_not_wake_torch(tmp_path: Path) -> None:
    run(LIGHT, tmp_path)
