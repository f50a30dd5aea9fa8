"""Where the words' flags come from: command line, environment, file, in this order; and who is to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import pytest

from specsot._version import __version__
from specsot.errors import InvalidRequest
from specsot.service.command import PROGRAMS, TableCommand, command
from specsot.service.option_table import entries_of, option
from specsot.service.options import DraftModelOptions
from specsot_app.cli import main, specsot
from specsot_master.config import MasterConfig

seen: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True)
class Small:
    max_parallel: int = option(8, "")
    constraint: bool = option(True, "", paired=True)
    stop: tuple[str, ...] = option((), "")
    layers: str | None = option(None, "")
    stages: int = option(1, "", aliases=("pipeline-parallel-size",))


@command(Small)
def infer(given: Small) -> None:
    if given.max_parallel == 13:
        raise InvalidRequest("max_parallel must be lucky", field="max_parallel")
    seen.append(asdict(given))


def asked(*words: str) -> dict[str, Any]:
    seen.clear()
    infer(list(words), standalone_mode=False)
    return seen[0]


def words_of(group: click.Group, before: tuple[str, ...] = ()) -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name in group.list_commands(click.Context(group)):
        word = group.get_command(click.Context(group), name)
        assert word is not None
        path = (*before, name)
        found += words_of(word, path) if isinstance(word, click.Group) else [("-".join(path), word)]
    return found


def test_every_word_takes_its_flags_from_anywhere() -> None:
    words = [(name, word) for name, word in words_of(specsot()) if name not in ("completion", "version")]
    assert all(isinstance(word, TableCommand) and word.table == name for name, word in words)
    assert {name for name, _ in words} | {"master", "worker", "drafter"} == set(PROGRAMS)


def test_underscores_are_dashes() -> None:
    assert asked("--max_parallel", "3")["max_parallel"] == 3


def test_command_line_environment_file_default(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file("max-parallel = 2\nconstraint = false\n[infer]\nmax_parallel = 3\n[serve]\nport = 1")
    assert asked()["max_parallel"] == 8
    assert asked("--config", path)["max_parallel"] == 3
    assert not asked("--config", path)["constraint"]
    monkeypatch.setenv("SPECSOT_CONFIG", path)
    monkeypatch.setenv("SPECSOT_MAX_PARALLEL", "4")
    assert asked()["max_parallel"] == 4
    assert asked("--max-parallel", "5", "--constraint") | {"max_parallel": 5, "constraint": True} == asked(
        "--constraint", "--max-parallel=5"
    )
    assert asked("--constraint")["constraint"]


def test_several_values_and_lists(file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = file('stop = ["The end", "Fin"]\nlayers = ["0:4", "4:8"]\npipeline-parallel-size = 2')
    assert asked("--config", path) == {
        "max_parallel": 8, "constraint": True, "stop": ("The end", "Fin"), "layers": "0:4,4:8", "stages": 2,
    }  # fmt: skip
    assert asked("--config", file('stop = "The end"'))["stop"] == ("The end",)
    monkeypatch.setenv("SPECSOT_STOP", "The end\nFin")
    monkeypatch.setenv("SPECSOT_CONSTRAINT", "no")
    assert asked("--stop", "x")["stop"] == ("x",)
    assert (asked()["stop"], asked()["constraint"]) == (("The end", "Fin"), False)


def test_vllm_s_names_count_on_the_command_line() -> None:
    assert asked("--pipeline-parallel-size", "4")["stages"] == 4


def test_what_a_word_refuses_is_blamed_on_its_source(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_parallel must be lucky"):
        asked("--max-parallel", "13")
    path = file("max-parallel = 13")
    with pytest.raises(InvalidRequest) as caught:
        asked("--config", path)
    assert str(caught.value) == f"{path}: max-parallel: max_parallel must be lucky"
    monkeypatch.setenv("SPECSOT_MAX_PARALLEL", "13")
    with pytest.raises(InvalidRequest, match=r"^SPECSOT_MAX_PARALLEL: max_parallel must be lucky"):
        asked()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max-paralel = 4", "max-paralel is no flag of infer; did you mean max-parallel?"),
        ("[infer]\nport = 4", "infer.port is no flag of infer"),
        ("[infre]\nport = 4", "no program has a table [infre]; they are "),
        ("max-parallel = 'many'", "max-parallel: 'many' is not a whole number"),
        ("infer.mode = 'fast'", "infer.mode: 'fast' is not one of"),
        ("max-parallel = 0", "max-parallel: max_parallel must be whole, > 0, got 0"),
        ("seed = {}", "no program has a table [seed]"),
        ("=", "Invalid statement (at line 1, column 1)"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    text: str, line: str, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(text)
    assert main(["infer", "Why?", "--config", path]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"specsot: {path}: {line}")
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_wrong_variable_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSOT_MODE", "fast")
    assert main(["infer", "Why?"]) == 2
    assert main(["infer", "Why?", "--mode", "quick"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("specsot: SPECSOT_MODE: 'fast' is not one of")
    assert second.startswith("specsot: Invalid value for '--mode': 'quick'")


def test_help_names_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "--help"]) == 0
    assert "[SPECSOT_MAX_NEW_TOKENS]" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specsot {__version__}\n"


def test_nothing_asked_for_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: ")


def test_the_page_tells_every_word_and_every_other_name(request: pytest.FixtureRequest) -> None:
    docs = request.config.rootpath / "docs"
    page = "".join((docs / name).read_text(encoding="utf-8") for name in ("serve.md", "options.md"))
    entries = (*entries_of(MasterConfig), *entries_of(DraftModelOptions))
    assert all(f"`--{other}`" in page for entry in entries for other in entry.option.aliases)
    assert all(f"`{name}`" in page or f"`specsot {name}" in page or f"[{name}]" in page for name in PROGRAMS)
