"""The product's wheel without the lab, as pip installs it from an index.

Its own words are complete, the lab's say what to install.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from specsot_app.cli import _refusing
from tests.conftest import REPOSITORY
from tools.try_release import pip_install, serving

pytestmark = [pytest.mark.slow, pytest.mark.processes]

OURS = ("specsot", "_specsot", "_editable")
RUN = """
import contextlib, io, json, sys
sys.path += json.loads(sys.argv[1])
from specsot_app.cli import main
sys.stdin = io.StringIO("How do I make Banana Pancakes?\\n")
told = {}
for line in sys.argv[2:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(json.loads(line))
    told[line] = status, out.getvalue(), err.getvalue()
"""
# Further lines of that program: whether names of other systems are ours, and which of their routes we serve.
NAMES = """
from specsot import SpecSoT, SpecSoTModel
from specsot.aiter import EAGLEConfig, EAGLEInference, sgl_verify_tree_greedy
from specsot.eagle import Eagle, EagleConfig, verify_tree_greedy
from specsot_master.http.app import installed_routes
names = SpecSoTModel is SpecSoT, EAGLEConfig is EagleConfig
told["names"] = [*names, *(routes.__name__ for routes in installed_routes())]
"""
QUESTION = ("chat", "--demo", "small", "--mode", "direct", "--drafter", "none", "--max-new-tokens", "8")
# Settings of pip that would have it look elsewhere than in the index of a test.
OF_PIP = ("PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
OWN = (("verify", "--help"), ("bench", "quick", "--help"), ("bench", "full", "--help"))
LABS = (("eval",), ("eval", "--help"), ("train", "--output", "x"), ("bench", "load", "--clients", "3"))
WITH_LAB = (("eval", "--help"), ("train", "--help"), ("bench", "load", "--help"))

Words = tuple[str, ...]
AnswerMessage = tuple[int, str, str]  # status, what it printed, what it complained of


@dataclass(frozen=True, slots=True)
class Install:
    """Folders a Python finds packages in: the installed wheel, and what it depends on."""

    wheel: Path
    others: Path

    def run(self, *lines: Words, then: str = "") -> dict[str, Any]:
        """One command line after the other, in one process: what came of each, by the line as JSON, and what
        further lines of Python have added.
        """
        paths = json.dumps([str(self.wheel), str(self.others)])
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"{RUN}{then}\nprint(json.dumps(told))",
            paths,
            *map(json.dumps, lines),
        ]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def build(project: Path, folder: Path) -> Path:
    """The folder of a new wheel, which was never compressed: that takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlib, "Z_DEFAULT_COMPRESSION", 0)
        (wheel,) = WheelBuilder(str(project)).build(directory=str(folder / "dist"), versions=["standard"])
    return Path(wheel).parent


def install(name: str, dist: Path, folder: Path) -> Path:
    """A folder with the package of that name, which pip finds in an index of our own."""
    with pytest.MonkeyPatch.context() as patch, serving(dist) as index:
        for variable in OF_PIP:
            patch.delenv(variable, raising=False)
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_INDEX_URL", f"{index.address}/simple")
        pip_install(Path(sys.executable), name, index, "--no-deps", f"--target={folder / name}")
    return folder / name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Everything that is installed here, but of SpecSoT the product's wheel alone."""
    folder = tmp_path_factory.mktemp("plain")
    others = folder / "others"
    others.mkdir()
    for packages in (Path(path) for path in sys.path if path.endswith("-packages")):
        for entry in packages.iterdir():
            link = others / entry.name
            if not entry.name.startswith(OURS) and not link.exists():
                link.symlink_to(entry)
    return Install(install("specsot", build(REPOSITORY, folder), folder), others)


@pytest.fixture(scope="module")
def ran(plain: Install) -> dict[str, Any]:
    return plain.run(("--help",), *OWN, *LABS, QUESTION, then=NAMES)


@pytest.fixture(scope="module")
def said(ran: dict[str, Any]) -> Mapping[Words, AnswerMessage]:
    return {tuple(json.loads(line)): tuple(said) for line, said in ran.items() if line != "names"}


def test_the_wheel_holds_the_product_and_its_reference_text(plain: Install) -> None:
    assert not (plain.wheel / "specsot_lab").exists()
    assert (plain.wheel / "specsot_bench/data/multi-doc-qa.jsonl").exists()


def test_it_answers_without_a_model_by_the_pair_it_brings(
    plain: Install, said: Mapping[Words, AnswerMessage]
) -> None:
    """And has the head for the model that it would fetch."""
    assert (plain.wheel / "specsot_app/models/smollm2/eagle3/model.safetensors").exists()
    status, answer, complaint = said[QUESTION]
    assert (status, len(answer.split()) > 1) == (0, True), complaint


@pytest.mark.parametrize("words", OWN, ids=" ".join)
def test_these_come_with_the_product(said: Mapping[Words, AnswerMessage], words: Words) -> None:
    status, shown, complaint = said[words]
    assert (status, complaint) == (0, "")
    assert shown.startswith("Usage: ")


@pytest.mark.parametrize("words", LABS, ids=" ".join)
def test_a_word_of_the_lab_says_in_one_line_what_to_install(
    said: Mapping[Words, AnswerMessage], words: Words
) -> None:
    status, shown, complaint = said[words]
    assert (status, shown, complaint.count("\n")) == (2, "", 1)
    assert "needs the lab: pip install ./lab" in complaint


def test_help_lists_the_same_words_with_and_without_the_lab(said: Mapping[Words, AnswerMessage]) -> None:
    status, shown, _ = said["--help",]
    assert status == 0
    assert {"verify", "train", "eval", "bench"} <= set(shown.split())


def test_the_lab_s_wheel_brings_its_words_and_its_prompts(plain: Install, tmp_path: Path) -> None:
    lab = install("specsot-lab", build(REPOSITORY / "lab", tmp_path), tmp_path)
    assert (lab / "specsot_lab/eval/data/gsm8k.jsonl").exists()
    both = Install(plain.wheel, tmp_path / "both")
    both.others.mkdir()
    for entry in (*plain.others.iterdir(), *lab.iterdir()):
        (both.others / entry.name).symlink_to(entry)
    for status, shown, complaint in both.run(*WITH_LAB).values():
        assert (status, complaint) == (0, "")
        assert shown.startswith("Usage: ")


def test_names_and_routes_of_other_systems_come_with_the_product(
    ran: dict[str, Any],
) -> None:
    assert ran["names"] == [True, True, "legacy_routes"]


def test_a_command_without_its_entry_point_reports_what_to_install() -> None:
    """As after an update of a checkout that was installed as editable."""
    assert "needs a new install: pip install ." in str(_refusing("verify").help)
    assert "needs the lab: pip install ./lab" in str(_refusing("bench.load").help)
