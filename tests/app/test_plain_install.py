"""The product's wheel without the lab: its own words are complete, the lab's say what to install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.processes]

OURS = ("specsot", "_specsot", "_editable")
RUN = "import sys; sys.path += {paths!r}; from specsot_app.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Install:
    """Folders a Python finds packages in: the unpacked wheel, and what it depends on."""

    wheel: Path
    others: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        code = RUN.format(paths=[str(self.wheel), str(self.others)])
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, *words], capture_output=True, text=True, check=False
        )


def build(project: Path, folder: Path) -> Path:
    """An unpacked wheel."""
    made, unpacked = folder / "dist", folder / "unpacked"
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(made)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
    return unpacked


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
    return Install(build(REPOSITORY, folder), others)


def test_the_wheel_holds_the_product_and_its_reference_text(plain: Install) -> None:
    assert not (plain.wheel / "specsot_lab").exists()
    assert (plain.wheel / "specsot_app/bench/data/multi-doc-qa.jsonl").exists()


def test_it_answers_without_a_model_by_the_pair_it_brings(plain: Install) -> None:
    """And has the head for the model that it would fetch."""
    assert (plain.wheel / "specsot_app/models/smollm2/eagle3/model.safetensors").exists()
    limits = ("--mode", "direct", "--drafter", "none", "--max-new-tokens", "8")
    done = plain.run("infer", "--demo", "small", *limits, "How do I make Banana Pancakes?")
    assert (done.returncode, len(done.stdout.split()) > 1) == (0, True), done.stderr


@pytest.mark.parametrize("words", [("verify",), ("bench", "quick"), ("bench", "full")], ids=" ".join)
def test_these_come_with_the_product(plain: Install, words: tuple[str, ...]) -> None:
    done = plain.run(*words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    "words",
    [("eval",), ("eval", "--help"), ("train", "--output", "x"), ("bench", "load", "--clients", "3")],
    ids=" ".join,
)
def test_a_word_of_the_lab_says_in_one_line_what_to_install(plain: Install, words: tuple[str, ...]) -> None:
    done = plain.run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "needs the lab: pip install ./lab" in done.stderr


def test_help_lists_the_same_words_with_and_without_the_lab(plain: Install) -> None:
    done = plain.run("--help")
    assert done.returncode == 0
    assert {"verify", "train", "eval", "bench"} <= set(done.stdout.split())


def test_the_lab_s_wheel_brings_its_words_and_its_prompts(plain: Install, tmp_path: Path) -> None:
    lab = build(REPOSITORY / "lab", tmp_path)
    assert (lab / "specsot_lab/eval/data/gsm8k.jsonl").exists()
    both = Install(plain.wheel, tmp_path / "both")
    both.others.mkdir()
    for entry in (*plain.others.iterdir(), *lab.iterdir()):
        (both.others / entry.name).symlink_to(entry)
    for words in (("eval",), ("train",), ("bench", "load")):
        done = both.run(*words, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Usage: ")
