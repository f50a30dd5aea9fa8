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


ROOMS = ("lab", "app", "services", "shared")  # of which every file says what it does


def test_the_reference_of_options_is_that_of_the_table() -> None:
    pytest.importorskip("specsot_lab")
    page = runpy.run_path(str(REPOSITORY / "docs" / "options.py"))
    assert page["PAGE"].read_text() == page["written"](), "run `make docs`"


def test_the_list_of_metrics_is_that_of_their_tables() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "metrics.py"))
    assert page["PAGE"].read_text() == page["written"](), "run `make docs`"


def test_what_is_shown_of_the_results_is_what_they_say() -> None:
    written = runpy.run_path(str(REPOSITORY / "tools" / "results.py"))["written"]()
    assert [file.name for file, text in written.items() if file.read_text() != text] == [], "run `make docs`"


def test_every_file_says_what_it_does() -> None:
    """In the first paragraph of its docstring, which is a sentence."""
    files = [file for room in ROOMS for file in (REPOSITORY / room).rglob("*.py") if "v1" not in file.parts]
    said = [(file, re.match(r'"""(.*?)(?:\n\n|""")', file.read_text(), re.DOTALL)) for file in files]
    assert len(said) > 400
    assert [file for file, found in said if found and not found[1].rstrip().endswith((".", ":"))] == []


def headings(page: Path) -> set[str]:
    """Their names in links, as GitHub and the site make them, and the places that a page names itself."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    )
    named = set(re.findall(r'<a id="([\w-]+)">', prose))
    return named | {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in titles}


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
