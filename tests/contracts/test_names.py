"""A class name is declared once in the whole house: a name in a traceback needs no folder."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow
ROOMS = ("shared", "services", "app", "lab")
# Public twice: as a Python name (tests/golden/surface/python.txt) and as a schema's name in /openapi.json.
PUBLIC_TWICE = {"Branch", "Candidate", "Planned", "Refused"}


def declared() -> dict[str, list[str]]:
    """Where each class is declared; what protoc generates is left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*.py"):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    return found


def test_a_class_name_is_declared_once() -> None:
    twice = {name: places for name, places in declared().items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in PUBLIC_TWICE} == {}
    assert twice.keys() == PUBLIC_TWICE, "an exemption that nothing needs any more"
