"""What the product's own code may never do: run what it was sent.

Read as syntax trees, so that words in comments do not count, and neither do other spellings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from unicodedata import normalize

import pytest

from tests.conftest import REPOSITORY

ROOMS = ("app", "services", "shared", "docker", "protos")
SOURCES = sorted(
    path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py") if path.parent.name != "v1"
)
MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "telnetlib",
}
NAMES = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "os": {"system", "popen"},
    "yaml": {"load", "unsafe_load", "full_load", "load_all"},
    "pty": {"spawn"},
    "pd": {"read_pickle"},
}
KEYWORDS = ("shell", "allow_pickle", "trust_remote_code")
ANYBODYS = {"recv_pyobj", "send_pyobj"}  # pyzmq's, which pickle


# No offence without one of these words.
CALLS = {rf"{owner}\W+{name}" for owner, names in METHODS.items() for name in names} | {r"torch\W+load"}
WORDS = (*MODULES, *ANYBODYS, *KEYWORDS, *CALLS)
SUSPICIOUS = re.compile(rf"(?<![.\w])(?:{'|'.join(NAMES)})\b|\b(?:{'|'.join(WORDS)})\b")


def offences(source: str) -> Iterator[str]:
    if not SUSPICIOUS.search(normalize("NFKC", source)):  # as the parser spells names
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {one.name}" for one in names if one.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"imports {module}"
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield f"calls {name}"
            case ast.Call(func=ast.Attribute(attr=name)) if name in ANYBODYS:
                yield f"calls {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if name in METHODS.get(
                owner, ()
            ):
                yield f"calls {owner}.{name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                if said(node, "weights_only") is not True:
                    yield "torch.load without weights_only=True"
            case ast.Call():
                yield from (f"says {word}=True" for word in KEYWORDS if said(node, word) is True)
            case _:
                pass


def said(call: ast.Call, word: str) -> object:
    """The constant that a keyword argument has."""
    values = [
        one.value.value for one in call.keywords if one.arg == word and isinstance(one.value, ast.Constant)
    ]
    return values[0] if values else None


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 200


@pytest.mark.slow
def test_nothing_that_was_received_is_run() -> None:
    found = {path.relative_to(REPOSITORY): list(offences(path.read_text())) for path in SOURCES}
    assert {path: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from torch import nn; import cloudpickle.compat",
        "eval (input())",
        "exec('x')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(words, shell=True)",
        "numpy.load(path, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "socket.recv_pyobj()",
        "def f():\n    __import__('x')",
        "os.system('ls')",
        "(os) \\\n .system('ls')",
        "ｅｖａｌ(input())",
    ],
)
def test_what_would_be_found(bad: str) -> None:
    assert list(offences(bad))


@pytest.mark.parametrize(
    "fine",
    [
        "re.compile('x')",
        "model.eval()",
        "torch.load(path, map_location='cpu', weights_only=True)",
        "yaml.safe_load(text)",
        "# pickle.loads",
        "'eval(x)'",
    ],
)
def test_what_would_not(fine: str) -> None:
    assert list(offences(fine)) == []


@pytest.mark.processes
def test_asking_for_health_waits_for_nothing_heavy() -> None:
    """The words of the command, and what a probe with certificates needs."""
    code = (
        "import sys; import specsot_app.cli, specsot.transport.grpc_channel; "
        "heavy = ('torch', 'transformers', 'structlog', 'fastapi', 'cryptography'); "
        "print([one for one in heavy if one in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
