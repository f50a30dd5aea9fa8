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


def generator() -> str:
    """An interpreter with the pinned generator: this one, or that of `make protos`."""
    pinned = runpy.run_path(str(GENERATE))["GENERATOR"]
    ask = "import importlib.metadata as m; print(m.version('grpcio-tools'))"
    for python in (sys.executable, str(ROOT / ".venv-protos" / "bin" / "python")):
        if Path(python).exists():
            said = subprocess.run([python, "-c", ask], capture_output=True, text=True)
            if said.stdout.strip() == pinned:
                return python
    pytest.skip(f"grpcio-tools=={pinned} is not installed; `make protos` installs it in .venv-protos")


@pytest.mark.processes
def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    subprocess.run([generator(), str(GENERATE), str(tmp_path)], check=True, capture_output=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "specsot" / "v1").glob("*_pb2*")}
    checked_in = {path.name: path.read_text() for path in STUBS.glob("*_pb2*")}
    assert fresh == checked_in, "run `make protos` and commit shared/specsot/v1"


def test_every_proto_has_its_stubs() -> None:
    protos = {path.stem for path in (ROOT / "protos" / "specsot" / "v1").glob("*.proto")}
    assert protos == {path.stem.removesuffix("_pb2") for path in STUBS.glob("*_pb2.py")}
