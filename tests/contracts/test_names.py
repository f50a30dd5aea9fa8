"""A class name is declared once in the whole house: a name in a traceback needs no folder."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow
ROOMS = ("shared", "services", "app", "lab")
# Public twice: as a Python name (tests/golden/surface/python.txt) and as a schema's name in /openapi.json.
PUBLIC_TWICE = {"Branch", "Candidate", "Planned", "Refused"}
# A syntax tree would take seconds: 500 files are read.
CLASS = re.compile(r"^[ \t]*class (\w+)[(:\[]", re.MULTILINE)


def declared() -> dict[str, list[str]]:
    """Where each class is declared; what protoc generates is left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*.py"):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            text = path.read_text(encoding="utf-8")
            for one in CLASS.finditer(text):
                line = text.count("\n", 0, one.start()) + 1
                found[one[1]].append(f"{path.relative_to(REPOSITORY)}:{line}")
    return found


def test_a_class_name_is_declared_once() -> None:
    twice = {name: places for name, places in declared().items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in PUBLIC_TWICE} == {}
    assert twice.keys() == PUBLIC_TWICE, "an exemption that nothing needs any more"
