"""What the documents claim, where a machine can check it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from specsot_app.cli import GROUPS, WORDS
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

DOCUMENTS = sorted(
    str(page.relative_to(REPOSITORY))
    for page in (
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *REPOSITORY.glob("models/*/README.md"),
    )
)


def test_every_file_has_its_line_in_the_architecture() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "files.py"))
    assert page["PAGE"].read_text() == page["written"](), "run `make docs`"


def test_the_reference_of_options_is_that_of_the_table() -> None:
    pytest.importorskip("specsot_lab")
    page = runpy.run_path(str(REPOSITORY / "docs" / "options.py"))
    assert page["PAGE"].read_text() == page["written"](), "run `make docs`"


def test_every_file_says_what_it_does_and_refuses_to_know() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "files.py"))
    assert all(page["first_line"](path).endswith((".", ":")) for path in page["files"]())


def headings(page: Path) -> set[str]:
    """Their names in links, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    place = REPOSITORY / document
    for target in re.findall(r"\]\(([^)]+)\)", place.read_text()):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        page = place.parent / name if name else place
        assert page.exists(), target
        assert not heading or page.suffix != ".md" or heading in headings(page), target


def test_the_readme_names_only_words_the_command_has() -> None:
    used = set(re.findall(r"(?<!from )\bspecsot ([a-z]+)\b", (REPOSITORY / "README.md").read_text()))
    assert used <= {*WORDS, *GROUPS}
