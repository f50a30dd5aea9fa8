"""Ctrl-C while a program is still importing, and while its threads are waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Ctrl-C is pressed as soon as a module is looked for.
PRESSED = """
import importlib, os, signal, sys

class Pressing:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

awaited, module, *words = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests may ignore it
sys.meta_path.insert(0, Pressing())
program = importlib.import_module(module)
sys.argv[:] = ["program", *words]
status = program.main()
signal.raise_signal(signal.SIGINT) if status == 130 else sys.exit("nobody pressed")
"""
NONE = ["--model", "none", "--master", "127.0.0.1:1", "--insecure", "on"]


@pytest.mark.parametrize(
    ("module", "loads", "words"),
    [
        ("specsot_app.__main__", "click", ["version"]),
        ("specsot_master.__main__", "grpc", []),
        ("specsot_worker.__main__", "specsot_worker.config", []),
        ("specsot_worker.__main__", "specsot.service.member", NONE),
        ("specsot_drafter.__main__", "specsot.service.member", [*NONE, "--draft-model", "none"]),
    ],
)
def test_ctrl_c_ends_a_program_that_imports_without_a_word(module: str, loads: str, words: list[str]) -> None:
    """The second one, which would find Python waiting for threads, ends it by the signal itself."""
    command = [sys.executable, "-c", PRESSED, loads, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -2)
