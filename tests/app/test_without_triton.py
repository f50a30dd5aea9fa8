"""A machine without a GPU has no Triton: what needs it says so in one line, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.torch]

# Runs one command line after the other in a process in which `import triton` fails.
RUN = """
import contextlib, io, json, sys
sys.modules["triton"] = None
from specsot_app.cli import main
results = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line)
    results.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""
INFER = (
    "infer", "--device", "cpu", "--quantization", "fp8", "--demo", "small", "--mode", "direct",
    "--drafter", "none", "--max-new-tokens", "4", "Why?",
)  # fmt: skip

Result = tuple[int, str, str]  # The exit status, and what the command printed to stdout and stderr.


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Both commands, in one process that loads torch once."""
    command = [sys.executable, "-c", RUN, json.dumps([INFER, ("bench", "kernels")])]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout
    return [tuple(result) for result in json.loads(output)]


def test_fp8_weights_are_multiplied_on_a_processor(results: list[Result]) -> None:
    status, answer, err = results[0]
    assert (status, "Traceback" in err) == (0, False), err
    assert answer.strip()


def test_the_bench_of_kernels_is_refused_in_one_line(results: list[Result]) -> None:
    pytest.importorskip("specsot_lab")
    refused = "specsot: bench kernels needs a GPU, and Triton: pip install 'specsot[gpu]'\n"
    assert results[1] == (2, "", refused)
