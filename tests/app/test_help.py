"""`--help` shows what a user needs, `--help=all` every option; both come from the options table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.shell_completion import ShellComplete

from specsot.service.command import TableCommand, read
from specsot.service.option_table import Tier, entries_of, option
from specsot_app.cli import main, specsot
from specsot_drafter.config import read_config as read_drafter
from specsot_master.config import read_config as read_master
from specsot_worker.config import read_config as read_worker
from tests.golden.surface import services_started


def flags_in(shown: str) -> list[str]:
    return re.findall(r"^  --([a-z0-9-]+)", shown, re.MULTILINE)


def flags_of(program: str) -> set[str]:
    """The flags of a command in the options table."""
    group = specsot()
    command = group.get_command(click.Context(group), program)
    assert isinstance(command, TableCommand)
    options = [(entry.flag, entry.option) for entry in command.entries]
    return {flag for flag, one in options if not (one.positional or one.secret or one.keyword_only)}


@pytest.mark.parametrize(("program", "most"), [("serve", 22), ("infer", 18), ("chat", 18)])
def test_help_shows_few_options_and_help_all_the_others(
    program: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([program, "--help"]) == 0
    few = flags_in(capsys.readouterr().out)
    assert main([program, "--help=all"]) == 0
    every = flags_in(capsys.readouterr().out)
    assert len(few) == len(set(few)) <= most
    assert set(few) < set(every) == flags_of(program) | {"config", "help"}


@pytest.mark.parametrize("reader", [read_master, read_worker, read_drafter])
def test_services_have_both_kinds_of_help(
    reader: Callable[[list[str]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[set[str]] = []
    for asked in ("--help", "--help=all"):
        with pytest.raises(SystemExit) as caught:
            reader([asked])
        assert caught.value.code == 0
        shown.append(set(flags_in(capsys.readouterr().out)))
    assert shown[0] < shown[1]
    assert {"listen", "log-level"} <= shown[0]


def test_all_may_be_a_word_of_its_own_and_any_other_word_is_not_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: list[str] = []
    for words in (["--help=all"], ["--help", "all"], ["--help"], ["--help", "Why?"], ["--help", "--json"]):
        assert main(["infer", *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[2] == shown[3] == shown[4]
    assert shown[0] != shown[2]


def test_help_says_how_many_options_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"--help=all shows all {len(flags_of('serve')) + 2} options, among them --config FILE" in said
    assert main(["status", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["status", "--help=all"]) == 0
    assert short == capsys.readouterr().out  # few options are shown at once
    assert "--config FILE" in short


def test_completion_knows_every_option_and_the_value_of_help() -> None:
    complete = ShellComplete(specsot(), {}, "specsot", "_SPECSOT_COMPLETE")

    def offered(incomplete: str) -> set[str]:
        return {str(one.value) for one in complete.get_completions(["serve"], incomplete)}

    assert {"--hop-dtype", "--model", "--draft-threshold"} <= offered("--")
    assert offered("--help=") == {"all"}


def test_serve_passes_its_log_level_to_every_service(tmp_path: Path) -> None:
    started = services_started(["serve", "--stages", "2", "--log-level", "debug"], tmp_path)
    lines = [service["typed"] for service in started.values()]
    assert len(lines) >= 4
    assert all("--log-level debug" in line for line in lines)


@dataclass(frozen=True, slots=True)
class Inner:
    kept: int = option(1, "Inherits the tier of the field that holds it.")
    shown: int = option(1, "Says its own.", tier="common")


@dataclass(frozen=True, slots=True)
class Outer:
    TIER: ClassVar[Tier] = "expert"

    inner: Inner = field(default_factory=Inner)
    plain: int = option(1, "As its class.")
    today: str = option("", "Was called otherwise.", former=("once",))


@dataclass(frozen=True, slots=True)
class Heir(Outer):
    own: int = option(1, "Of a class that says nothing.")


def test_the_tier_is_the_option_s_own_else_that_of_the_class_that_declares_it() -> None:
    tiers = {entry.flag: entry.tier for entry in entries_of(Heir)}
    assert tiers == {
        "kept": "expert", "shown": "common", "plain": "expert", "today": "expert", "own": "common"
    }  # fmt: skip


def test_a_former_name_holds_as_a_flag_a_variable_and_a_key_and_todays_wins(tmp_path: Any) -> None:
    file = tmp_path / "file.toml"
    file.write_text('once = "file"\n')

    def today(words: list[str], **environment: str) -> str:
        return read("worker", Outer, "", words, environment).today

    assert today(["--once", "flag"]) == "flag"
    assert today([], SPECSOT_ONCE="variable") == "variable"
    assert today(["--config", str(file)]) == "file"
    assert today([], SPECSOT_ONCE="variable", SPECSOT_TODAY="newer") == "newer"


def test_the_model_s_public_name_has_vllm_s_name_and_keeps_its_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for words in (["--served-model-name", "x"], ["--name", "x"], ["--alias", "x"]):
        assert read_master(["--model", "m", *words]).ring.name == "x"
    monkeypatch.setenv("SPECSOT_NAME", "y")
    assert read_master(["--model", "m"]).ring.name == "y"
