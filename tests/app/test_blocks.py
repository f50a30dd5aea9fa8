"""What the documents' blocks name is there (recipes, modules, files); their TOML, YAML and JSON is read.

Commands and answers themselves are run by test_snippets.py, test_readme.py, tests/contracts/test_grpcurl.py,
tests/eagle/test_document.py and tests/security/test_recipe.py.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.app.test_snippets import PAGES, read_by
from tests.conftest import REPOSITORY

FENCED = re.compile(r"^```(?P<kind>\w*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
# Languages of blocks that a test runs or reads; those without one are commands and what they print.
KINDS = {"", "python", "toml", "yaml"}
# Commands that read the file of a [table]; `worker` and the like are services of their own.
READERS = {"serve": "specsot serve", "infer": "specsot infer Why?", "worker": "specsot-worker --master a:1"}
BLOCKS = [
    (str(page.relative_to(REPOSITORY)), found["kind"], found["body"])
    for page in (*sorted(PAGES), REPOSITORY / "CONTRIBUTING.md")
    for found in FENCED.finditer(page.read_text())
]
SHELL = [(page, line) for page, kind, body in BLOCKS if not kind for line in body.splitlines()]
FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")
FILES = re.compile(r"(?<![\w/.])(?:docker|deploy|tests|tools|models)/[\w./-]+|(?<=-f )[\w.-]+\.ya?ml")
# Flags of other programs: pip, docker, guidellm, and a script of the lab.
FOREIGN = {
    "--no-deps",
    "--wheel-dir",
    "--require-hashes",
    "--build-arg",
    "--target",
    "--shape",
    "--help",
    "--text",
}
# What a reader has, and this repository has not.
THEIRS = re.compile(r"models/(llama|pythia|smollm2(-head|/base)?$|own)|^tests/clients/requests")


def of(kind: str) -> list[tuple[str, str]]:
    return [(page, body) for page, own, body in BLOCKS if own == kind]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {kind for _, kind, _ in BLOCKS} == KINDS


def test_every_recipe_is_one_of_the_makefile() -> None:
    recipes = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = {word for _, line in SHELL for word in re.findall(r"(?:^|&& )make ((?:[a-z-]+ ?)+)", line)}
    words = {word for several in named for word in several.split()}
    assert {"demo", "install", "check", "clients"} <= words
    assert words <= recipes


@pytest.mark.parametrize("line", sorted({line for _, line in SHELL if re.search(r"python3? -m [a-z]", line)}))
def test_every_module_is_there(line: str) -> None:
    for module in re.findall(r"python3? -m ([\w.]+)", line):
        if module.startswith("specsot_lab"):
            pytest.importorskip("specsot_lab")
        assert find_spec(module), module


def test_every_file_that_a_command_names_is_there() -> None:
    named = {
        (page, file.rstrip(".")) for page, line in SHELL for file in FILES.findall(line.partition("  #")[0])
    }
    ours = {(page, file) for page, file in named if not THEIRS.search(file)}
    assert len(ours) > 10
    assert [pair for pair in sorted(ours) if not (REPOSITORY / pair[1]).exists()] == []


def test_every_flag_that_a_sentence_names_is_an_option() -> None:
    """But those of other systems, which docs/migrating.md maps to ours."""
    options = set(re.findall(r"`(--[a-z][\w-]*)`", (REPOSITORY / "docs" / "options.md").read_text()))
    switches = {f"--no-{option.removeprefix('--')}" for option in options}
    pages = [page for page in PAGES if page.name not in ("options.md", "migrating.md")]
    sentences = "".join(FENCED.sub("", page.read_text()) for page in pages)
    named = {flag for code in re.findall(r"`([^`\n]+)`", sentences) for flag in FLAG.findall(code)}
    assert len(named) > 100
    assert named - options - switches <= FOREIGN


@pytest.mark.parametrize(("page", "body"), of("toml"))
def test_a_configuration_is_read_by_every_command_that_it_has_a_table_for(
    page: str, body: str, tmp_path: Path
) -> None:
    file = tmp_path / "specsot.toml"
    file.write_text(body)
    tables = [name for name, value in tomllib.loads(body).items() if isinstance(value, dict)]
    assert tables
    for name in tables:
        read_by(f"{READERS[name]} --config {file}")


@pytest.mark.parametrize(("page", "body"), of("yaml"))
def test_yaml_is_yaml(page: str, body: str) -> None:
    assert isinstance(yaml.safe_load(body), dict)


def test_a_wording_is_json() -> None:
    """And as the page says, a file that specsot.json may be."""
    (body,) = (body for page, body in of("") if page == "docs/api.md" and body.startswith('{"wording"'))
    assert json.loads(body)["wording"]["form"] == "turns"
