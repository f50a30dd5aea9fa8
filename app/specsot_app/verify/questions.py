"""What a model is asked when it is verified.

Refuses to know models and answers.
"""

from __future__ import annotations

from pathlib import Path

from specsot.errors import InvalidRequest
from specsot_app.fleet_options import demo

QUESTIONS = (
    "Explain how photosynthesis works.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the main differences between TCP and UDP?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "请用三句话介绍长城。",
)
DEMO_STRIDE = 127  # the demo's topics stand in the order of the alphabet


def choose_questions(file: Path | None, of_demo: bool) -> tuple[str, ...]:
    """The file's, one a line; else some that the demo was trained on, or some for any model.

    Raises InvalidRequest for a file that cannot be read or is empty.
    """
    if file is not None:
        return read_questions(file)
    if not of_demo:
        return QUESTIONS
    topics = read_questions(demo() / "topics.txt")
    return tuple(topics[number * DEMO_STRIDE % len(topics)] for number in range(len(QUESTIONS)))


def read_questions(file: Path) -> tuple[str, ...]:
    """One a line; empty lines do not count."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"prompts: {file}: {_reason(error)}", field="prompts") from None
    asked = tuple(line.strip() for line in lines if line.strip())
    if not asked:
        raise InvalidRequest(f"prompts: {file}: no prompt in it", field="prompts")
    return asked


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
