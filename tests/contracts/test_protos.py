"""The protos: nothing that was promised changes or vanishes, and buf, where it is, has nothing to say.

Who changes a promise on purpose writes the baseline anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from specsot.v1 import fleet_pb2, master_pb2, ring_pb2, values_pb2
from tests.conftest import REPOSITORY
from tests.contracts.promises import broken

BASELINE = REPOSITORY / "protos" / "baseline.binpb"
BUF = shutil.which("buf", path=f"{REPOSITORY}/.venv-protos/node_modules/.bin{os.pathsep}{os.environ['PATH']}")

Files = dict[str, FileDescriptorProto]


def promised() -> Files:
    files = FileDescriptorSet.FromString(BASELINE.read_bytes()).file
    return {file.name.rpartition("/")[2]: file for file in files}


def served() -> list[FileDescriptorProto]:
    """What the stubs know; another test holds them to the protos."""
    files = [FileDescriptorProto() for _ in range(4)]
    for file, stub in zip(files, (fleet_pb2, master_pb2, ring_pb2, values_pb2)):
        stub.DESCRIPTOR.CopyToProto(file)
    return files


def test_every_promise_is_kept() -> None:
    assert broken(promised().values(), served()) == []


def test_there_are_promises() -> None:
    assert set(promised()) == {"fleet.proto", "master.proto", "ring.proto", "values.proto"}


def drop_a_message(files: Files) -> None:
    del files["values.proto"].message_type[0]


def drop_a_field(files: Files) -> None:
    del files["values.proto"].message_type[0].field[1]


def renumber_a_field(files: Files) -> None:
    files["values.proto"].message_type[0].field[1].number = 99


def rename_a_field(files: Files) -> None:
    files["values.proto"].message_type[0].field[1].name = "other"


def retype_a_field(files: Files) -> None:
    files["values.proto"].message_type[0].field[1].type = FieldDescriptorProto.TYPE_UINT64


def repeat_a_field(files: Files) -> None:
    field = files["values.proto"].message_type[0].field[0]
    field.label = FieldDescriptorProto.LABEL_REPEATED


def let_a_field_be_always_there(files: Files) -> None:
    (request,) = [m for m in files["master.proto"].message_type if m.name == "GenerateRequest"]
    next(field for field in request.field if field.proto3_optional).proto3_optional = False


def rename_an_enum_value(files: Files) -> None:
    files["values.proto"].enum_type[0].value[1].name = "OTHER"


def drop_a_call(files: Files) -> None:
    del files["master.proto"].service[0].method[0]


def answer_a_call_once(files: Files) -> None:
    files["master.proto"].service[0].method[0].server_streaming = False


def move_to_another_file(files: Files) -> None:
    files["ring.proto"].message_type.append(files["values.proto"].message_type.pop())


def rename_the_package(files: Files) -> None:
    files["values.proto"].package = "specsot.v2"


@pytest.mark.parametrize(
    "change",
    [
        drop_a_message,
        drop_a_field,
        renumber_a_field,
        rename_a_field,
        retype_a_field,
        repeat_a_field,
        let_a_field_be_always_there,
        rename_an_enum_value,
        drop_a_call,
        answer_a_call_once,
        move_to_another_file,
        rename_the_package,
    ],
    ids=lambda change: change.__name__,
)
def test_a_broken_promise_is_seen(change: Callable[[Files], None]) -> None:
    files = promised()
    change(files)
    assert broken(promised().values(), files.values())


def test_what_is_new_breaks_nothing() -> None:
    files = promised()
    files["values.proto"].message_type[0].field.add(name="more", number=99)
    files["values.proto"].message_type.add(name="More")
    files["values.proto"].enum_type[0].value.add(name="MORE", number=99)
    assert broken(promised().values(), files.values()) == []


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
