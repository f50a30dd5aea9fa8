"""The checked-in stubs are what the pinned generator makes of the protos today.

Knows nothing of what the protos mean. Skips, saying so, where the generator is not installed.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATE = ROOT / "protos" / "generate.py"
STUBS = ROOT / "shared" / "specsot" / "v1"


def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    known = runpy.run_path(str(GENERATE))
    if known["installed_generator"]() != known["GENERATOR"]:
        pytest.skip(f"grpcio-tools=={known['GENERATOR']} is not installed here")
    subprocess.run([sys.executable, str(GENERATE), str(tmp_path)], check=True, capture_output=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "specsot" / "v1").glob("*_pb2*")}
    checked_in = {path.name: path.read_text() for path in STUBS.glob("*_pb2*")}
    assert fresh == checked_in, "run `make protos` and commit shared/specsot/v1"


def test_every_proto_has_its_stubs() -> None:
    protos = {path.stem for path in (ROOT / "protos" / "specsot" / "v1").glob("*.proto")}
    assert protos == {path.stem.removesuffix("_pb2") for path in STUBS.glob("*_pb2.py")}
