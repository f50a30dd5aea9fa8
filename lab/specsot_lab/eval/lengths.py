"""`specsot eval --lengths`: measures how long direct answers are, at which planned ones aim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from specsot.checkpoint.resolving import folder_of_model
from specsot.errors import InvalidRequest
from specsot.events import Finished, Reason
from specsot.params import Ask, Limits, Sampling
from specsot_app.fleet.opening import FleetClient, Opener
from specsot_app.fleet.options import FleetOptions
from specsot_bench.asking import finished_answer
from specsot_bench.core.tables import figure, markdown, text
from specsot_lab.eval.core.usual_lengths import MIN_ANSWERS, MeasuredAnswer, lengths_of, rows_of
from specsot_lab.eval.local_model import answer_each, open_local, question_in, read_rows, store_wording
from specsot_master.core.limits import USUAL_PLAN_TOKENS
from specsot_master.core.plans.answer_forms import form_of
from specsot_master.core.plans.introduction import Introduction, find_introduction
from specsot_master.core.plans.router import decide_question
from specsot_master.core.plans.short_answers import ShortAnswer
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.wording import kind_of, language_of
from specsot_master.prompts import PARTS_FILE
from specsot_master.text import Text

MAX_ANSWER_TOKENS: Final = 1024  # Tokens of an answer. A longer one has no known length and is left out.
READ_TOKENS: Final = 160  # First tokens of an answer that tell whether a planned answer would replace it.


async def evaluate(
    options: FleetOptions,
    prompts: Path | None,
    write: bool,
    at_once: int,
    opener: Opener,
    out: TextIO,
    err: TextIO,
) -> int:
    """Print a table of the lengths by class of question and answer. Return the exit status 0.

    options: Options of the fleet.
    prompts: File of questions. None: the bundled ones.
    write: Store the usual lengths in the model's specsot.json. False: only print what would be written.
    at_once: Number of answers that are written concurrently.
    opener: Opens the fleet.
    out: Gets the table.
    err: Gets a progress bar.
    Raises InvalidRequest if a running master is named, if the model was taught to plan, if the questions
    cannot be read, or if the answers are too few. Raises ModelError if the model cannot be read.

    Every question is answered directly and greedily. Questions that the router answers directly are not
    asked. The fleet is opened only after the questions have been read, and is closed in every case.
    """
    base, tokenizer, prompt_builder = open_local(
        options, "lengths", "the lengths are", "plan, so its plans say how long points are"
    )
    questions = read_questions(prompts)

    async def answer(fleet: FleetClient, question: str) -> MeasuredAnswer | None:
        """Return the class and length of the direct answer to a question. Return None if the answer does not
        count.

        fleet: Client of the open fleet.
        question: The words of the question.
        """
        limits = Limits(max_new_tokens=MAX_ANSWER_TOKENS)
        ask = Ask(prompt=question, mode="direct", sampling=Sampling(), limits=limits)
        finished = await finished_answer(fleet, ask)
        return measured_answer(question, finished, tokenizer, prompt_builder.wording.paragraph_tokens)

    found = await answer_each(options, opener, questions, answer, at_once, ("answers", err))
    answers = [one for one in found if one is not None]
    print_lengths(answers, len(questions), out)
    file = folder_of_model(base) / PARTS_FILE
    if write:
        store_lengths(file, answers)
        out.write(f"written to {file}\n")
    else:
        out.write(f"--write puts the usual lengths into {file}\n")
    return 0


def measured_answer(
    question: str, finished: Finished, tokenizer: Text, paragraph_tokens: int | None
) -> MeasuredAnswer | None:
    """Return the class and the length of a direct answer. Return None if no planned answer would replace it,
    because it has no introduction or is short, or if a limit cut it.

    question: The words of the question.
    finished: The end of the answer.
    tokenizer: The model's tokenizer.
    paragraph_tokens: See `Wording.paragraph_tokens`.
    """
    if finished.reason is not Reason.STOP:
        return None
    short = ShortAnswer(paragraph_tokens)
    introduction = Introduction()
    detokenizer = tokenizer.detokenizer()
    begun = ""
    for count, token in enumerate(finished.tokens[:READ_TOKENS], 1):
        piece = TextPiece(token, detokenizer.feed([token]))
        short.read(piece)
        begun += piece.text
        if not introduction.complete:
            introduction = find_introduction(begun, count)
    if len(finished.tokens) <= READ_TOKENS:
        short.end()
        if not introduction.complete:
            introduction = find_introduction(begun, len(finished.tokens), ended=True)
    if not introduction.usable or short.is_short(USUAL_PLAN_TOKENS, plan_complete=True):
        return None
    classes = language_of(question), kind_of(question), form_of(finished.text)
    return MeasuredAnswer(*classes, len(finished.tokens))


# Columns of the table of lengths.
COLUMNS = (
    text("language", "language"),
    text("question", "kind"),
    text("answer", "form"),
    figure("answers", "answers", 0),
    figure("shortest", "shortest", 0),
    figure("usual", "usual", 0),
    figure("longest", "longest", 0),
    figure("near the usual", "near", 0),
)


def print_lengths(answers: Sequence[MeasuredAnswer], questions: int, out: TextIO) -> None:
    """Print the table of lengths in tokens, by class, and how many answers did not count.

    answers: The direct answers that count.
    questions: Number of questions that were asked.
    out: Gets the table.

    Raises InvalidRequest if no language has enough answers.
    """
    lengths = lengths_of(answers)
    if not lengths:
        raise InvalidRequest(
            f"no language has {MIN_ANSWERS} answers that a planned one would replace", "prompts"
        )
    out.write(f"{markdown(COLUMNS, rows_of(answers, lengths))}\n\n")
    left_out = questions - len(answers)
    out.write(f"{left_out} of {questions} answers are short, have no introduction or were cut\n")


def store_lengths(file: Path, answers: Sequence[MeasuredAnswer]) -> None:
    """Store the usual lengths in a model's specsot.json. Other keys of the file stay as they are; an absent
    file is created. Languages without enough answers keep the lengths that the file has for them.

    file: The model's specsot.json.
    answers: The direct answers that count.

    Raises ValueError if the file is not JSON.
    """
    lengths = lengths_of(answers)
    store_wording(file, lambda wording: {"answer_tokens": {**wording.get("answer_tokens", {}), **lengths}})


def read_questions(file: Path | None) -> tuple[str, ...]:
    """Return the distinct questions of a file that the router plans, in order.

    file: JSON lines with "question". None: the bundled questions.
    Raises InvalidRequest if the file cannot be read, or has no question that is planned.

    Blank lines are skipped, and repeated questions count once. A line that is not a JSON object with
    "question" raises InvalidRequest for the whole file. Questions that are not strings are converted.
    """
    questions, source = read_rows(file, "lengths.jsonl", question_in)
    planned = tuple(
        question for question in dict.fromkeys(questions) if decide_question(question).mode == "sot"
    )
    if not planned:
        raise InvalidRequest(f"{source} has no question that is planned", "prompts")
    return planned
