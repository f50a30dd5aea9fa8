"""The protos: nothing that was promised changes or vanishes, and buf, where it is, has nothing to say.

Who changes a promise on purpose writes the baseline anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from specsot.v1 import fleet_pb2, master_pb2, models_pb2, ring_pb2, values_pb2
from tests.conftest import REPOSITORY
from tests.contracts.promises import broken

BASELINE = REPOSITORY / "protos" / "baseline.binpb"
BUF = shutil.which("buf", path=f"{REPOSITORY}/.venv-protos/node_modules/.bin{os.pathsep}{os.environ['PATH']}")


def promised() -> dict[str, FileDescriptorProto]:
    files = FileDescriptorSet.FromString(BASELINE.read_bytes()).file
    return {file.name.rpartition("/")[2]: file for file in files}


def served() -> list[FileDescriptorProto]:
    """What the stubs know; another test holds them to the protos."""
    files = [FileDescriptorProto() for _ in range(5)]
    for file, stub in zip(files, (fleet_pb2, master_pb2, models_pb2, ring_pb2, values_pb2)):
        stub.DESCRIPTOR.CopyToProto(file)
    return files


def test_every_promise_is_kept() -> None:
    assert broken(promised().values(), served()) == []


def test_there_are_promises() -> None:
    assert set(promised()) == {"fleet.proto", "master.proto", "models.proto", "ring.proto", "values.proto"}


def test_a_broken_promise_is_seen_and_what_is_new_breaks_nothing() -> None:
    files = promised()
    first, calls = files["values.proto"].message_type[0], files["master.proto"].service[0].method
    first.field.add(name="more", number=99)
    files["values.proto"].message_type.add(name="More")
    assert broken(promised().values(), files.values()) == []
    first.field[1].name, first.field[0].label = "other", FieldDescriptorProto.LABEL_REPEATED
    calls[0].server_streaming = False
    del calls[1], files["ring.proto"]
    told = broken(promised().values(), files.values())
    for name in (f"{first.name} 1", f"{first.name} 2", "Master/Generate", "Master/Cancel", "file "):
        assert any(name in one.partition(":")[0] for one in told), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("lint",), ("format", "--diff", "--exit-code"), ("breaking", "--against", str(BASELINE))],
    ids=lambda words: words[0],
)
def test_buf_is_content(words: tuple[str, ...]) -> None:
    if BUF is None:
        pytest.skip("buf is not here; `make buf` brings it where npm is")
    said = subprocess.run([BUF, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")
