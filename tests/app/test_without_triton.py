"""A machine without a GPU has no Triton: what needs it says so in one line, and nothing else does."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.torch]

RUN = (
    "import sys; sys.modules['triton'] = None; from specsot_app.cli import main; sys.exit(main(sys.argv[1:]))"
)


def told(*words: str) -> tuple[int, str, str]:
    """Exit status and what is printed, where `import triton` fails."""
    ended = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout, ended.stderr


def test_fp8_weights_are_multiplied_on_a_processor() -> None:
    words = ("--demo", "small", "--mode", "direct", "--drafter", "none", "--max-new-tokens", "4", "Why?")
    status, answer, err = told("infer", "--device", "cpu", "--quantization", "fp8", *words)
    assert (status, "Traceback" in err) == (0, False), err
    assert answer.strip()


def test_the_bench_of_kernels_is_refused_in_one_line() -> None:
    pytest.importorskip("specsot_lab")
    refused = "specsot: bench kernels needs a GPU, and Triton: pip install 'specsot[gpu]'\n"
    assert told("bench", "kernels") == (2, "", refused)
