"""Asks a fleet the questions of a file, and shows how many answers have come."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Finished, Reason
from specsot.params import Ask
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.opening import FleetClient, final_view
from specsot_app.terminal.show import bars

# Steps through the small model's topics, since neighbouring topics are similar. Untuned.
TOPIC_STRIDE = 127


def questions_of(
    file: Path | None, is_small_model: bool, default_questions: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the questions in a file, one a line; without a file the small model's topics, or the default
    questions.

    The topics are returned in steps of TOPIC_STRIDE, so that neighbours differ.

    White space around lines and empty lines are dropped. With a file, its lines keep their order.

    file: File of UTF-8 text; None: no file was given.
    is_small_model: True if the bundled small model will answer.
    default_questions: Questions for other models, if no file was given.
    Raises InvalidRequest for a file that cannot be read or is empty.
    """
    if file is None and not is_small_model:
        return default_questions
    question_file = file or small_pair() / "topics.txt"
    try:
        lines = [
            line.strip() for line in question_file.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise InvalidRequest(f"prompts: {question_file}: {reason}", field="prompts") from None
    if not lines:
        raise InvalidRequest(f"prompts: {question_file}: no prompt in it", field="prompts")
    return tuple(
        lines if file else (lines[number * TOPIC_STRIDE % len(lines)] for number in range(len(lines)))
    )


async def finished_answer(fleet: FleetClient, ask: Ask) -> Finished:
    """Send a request to the fleet, and return its last event.

    Unavailable is raised as well if the events end without a last event.

    fleet: The client that answers.
    ask: The request.
    Raises Unavailable if the answer ended for another reason than STOP or LENGTH.
    """
    end = (await final_view(fleet, ask)).finished
    if end is None or end.reason not in (Reason.STOP, Reason.LENGTH):
        raise Unavailable(f"the answer ended with {end.reason.value if end else 'nothing'}")
    return end


@contextmanager
def counting_bar(err: TextIO, description: str, total: int) -> Generator[Callable[[], None]]:
    """Show a bar within the context, which yields a function; each call advances the bar by one and returns
    None.

    err: Stream to draw on.
    description: Text before the bar.
    total: Number of calls that fill the bar.
    """
    with bars(err) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
