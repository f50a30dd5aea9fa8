"""`specsot eval --plans`: measures with which form of words a model writes the points of a plan best."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO, cast

from specsot.checkpoint.resolving import folder_of_model
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import InvalidRequest
from specsot.events import Numbered, Planned
from specsot.params import Ask, Limits, Message, Sampling
from specsot_app.fleet.opening import FleetClient, Opener, final_view
from specsot_app.fleet.options import FleetOptions
from specsot_bench.asking import counting_bar
from specsot_bench.core.tables import figure, markdown, text
from specsot_lab.eval.core.branch_faults import BranchFaults, WrittenPlan, choose_form, measure
from specsot_lab.eval.local_model import open_local, question_in, read_rows, store_wording
from specsot_master.core.limits import LIST_POINT_TOKENS
from specsot_master.core.plans.wording import FORMS, Form
from specsot_master.prompts import PARTS_FILE, ListConversation, Prompts
from specsot_master.text import Text

MIN_QUESTIONS: Final = 30  # Questions. Fewer do not say which form a model needs. Untuned.
MAX_POINTS: Final = 4  # Points of a plan at most. Untuned.
WRITTEN_POINTS: Final = 3  # Points of a plan that are written; shared openings show in three. Bounds the run.
POINT_TOKENS: Final = 128  # Tokens of a branch; two or three sentences take about 60. A bound.
ANSWERS_FILE: Final = "wordings.jsonl"  # In the output folder: every answer, from which a run is continued.


@dataclass(frozen=True, slots=True)
class PlanToWrite:
    """A question with the points that the model planned for it.

    question: The words of the question.
    points: The points; empty if the model planned nothing.
    """

    question: str
    points: tuple[Point, ...]


class Answers:
    """Plans and answers that a fleet writes greedily. Each is stored in a file as soon as it is complete, and
    read from there by a later run.

    fleet: Client of the open fleet.
    file: JSON lines of earlier answers, which are not asked for again. Its folder is created.
    at_once: Number of answers that are written concurrently.
    """

    def __init__(self, fleet: FleetClient, file: Path, at_once: int) -> None:
        """Read the answers of earlier runs. A plan is found again by its question, and an answer by its
        prompt and its limit of tokens.

        fleet: Client of the open fleet.
        file: JSON lines of earlier answers, to which new ones are appended. Its folder is created; a missing
            file counts as empty.
        at_once: Number of answers that are written concurrently.
        """
        self._fleet = fleet
        self._file = file
        self._slots = asyncio.Semaphore(at_once)
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = read_answers(file)
        self._texts_by_prompt = {row["prompt"]: row["text"] for row in rows if row["prompt"]}
        self._plans: dict[str, list[str]] = {row["question"]: row["plan"] for row in rows if "plan" in row}

    async def plan(self, question: str) -> tuple[Point, ...]:
        """Return the points that the model plans for a question, at most MAX_POINTS; an empty tuple if it
        planned nothing. The points themselves are not written.

        question: The words of the question.

        A plan of an earlier run is read from the file. A new one is appended to the file, an empty plan
        included. The points are numbered from 1 and have no other fields than their title set. Raises what
        the fleet raises if the request fails.
        """
        if question not in self._plans:
            ask = Ask(
                prompt=question, mode="sot", limits=Limits(max_new_tokens=MAX_POINTS * LIST_POINT_TOKENS)
            )
            async with self._slots:
                self._plans[question] = await self._first_plan(ask)
            self._append_row({"prompt": "", "question": question, "plan": self._plans[question]})
        return tuple(Point(id, 1, title) for id, title in enumerate(self._plans[question], 1))

    async def _first_plan(self, ask: Ask) -> list[str]:
        """Return the titles of the first plan of a request, which is then cancelled by closing its events.
        Return an empty list if the request ends without a plan.

        ask: The request.

        Raises SpecsotError if the request fails before it has a plan.
        """
        async with aclosing(cast("AsyncGenerator[Numbered]", self._fleet.generate(ask))) as events:
            async for numbered in events:
                if isinstance(numbered.event, Planned):
                    return [point.title for point in numbered.event.points]
        return []

    async def write(self, tokens: Sequence[int], max_tokens: int, **fields: Any) -> str:
        """Return the answer to a prompt, from the file if it was answered before. Return an empty text if the
        fleet did not finish the answer.

        tokens: Token ids of the prompt.
        max_tokens: Maximum number of tokens of the answer.
        fields: Further fields of the stored row, by name, for its reader.

        The prompt is recognised by its token ids together with `max_tokens`. An empty text is stored, too, so
        that it is not asked for again.
        """
        prompt_key = hashlib.sha256(json.dumps([list(tokens), max_tokens]).encode()).hexdigest()[:16]
        if prompt_key not in self._texts_by_prompt:
            ask = Ask(
                tokens=tuple(tokens),
                mode="direct",
                sampling=Sampling(),
                limits=Limits(max_new_tokens=max_tokens),
            )
            async with self._slots:
                view = await final_view(self._fleet, ask)
            self._texts_by_prompt[prompt_key] = view.finished.text if view.finished else ""
            self._append_row({"prompt": prompt_key, **fields, "text": self._texts_by_prompt[prompt_key]})
        return self._texts_by_prompt[prompt_key]

    def _append_row(self, row: Mapping[str, Any]) -> None:
        """Append a row to the file.

        row: The fields of one plan or answer.
        """
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_answers(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of plans and answers; an empty list if the file does not exist. A last line
    that was cut off is left out.

    file: The file of JSON lines.

    Raises ValueError if another line is not JSON. The file is not changed.
    """
    if not file.exists():
        return []
    complete_lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in complete_lines]


class Measurement:
    """The measurement of one model: it plans all questions, and then writes their points in every form of
    words.

    prompts: Builds the prompts, and has the model's wording.
    text: The tokenizer.
    answers: Asks the fleet.
    """

    def __init__(self, prompts: Prompts, text: Text, answers: Answers) -> None:
        """Prepare to measure. Plans are asked for as lists of at most MAX_POINTS points, never as direct
        answers.

        prompts: Builds the prompts, and has the model's wording.
        text: The tokenizer.
        answers: Asks the fleet.
        """
        self._wording = prompts.wording
        self._text = text
        self._answers = answers
        self._rules = PlanRules(direct=False, max_points=MAX_POINTS, listed=True)

    async def plan(self, question: str) -> PlanToWrite:
        """Return a question with the points that the product keeps of the list that the model wrote.

        question: The words of the question.
        """
        return PlanToWrite(question, await self._answers.plan(question))

    async def write(self, plan: PlanToWrite, form: Form) -> WrittenPlan:
        """Return a plan whose first WRITTEN_POINTS points the model wrote in one form of words.

        plan: The question and its points.
        form: The form of words in which the points are asked for.

        A plan without points gives a WrittenPlan without sections. The sections are stripped, and end before
        a line that begins with "#". The sections are asked for concurrently.
        """
        turns = self._turns(plan.question, form)
        texts = [
            self._answers.write(
                turns.branch(point, plan.points, [], POINT_TOKENS).tokens,
                POINT_TOKENS,
                question=plan.question,
                form=form,
                title=point.title,
            )
            for point in plan.points[:WRITTEN_POINTS]
        ]
        titles = tuple(point.title for point in plan.points[:WRITTEN_POINTS])
        # A branch of an article may continue with the next heading, before which the product ends it.
        sections = (text.partition("\n#")[0].strip() for text in await asyncio.gather(*texts))
        return WrittenPlan(plan.question, titles, tuple(sections))

    def _turns(self, question: str, form: Form) -> ListConversation:
        """Return the conversation that asks for the points of a question in one form of words.

        question: The words of the question.
        form: The form of words.
        """
        wording = replace(self._wording, form=form)
        return ListConversation(self._text, (Message("user", question),), self._rules, wording)


async def evaluate(
    options: FleetOptions,
    prompts: Path | None,
    output: Path,
    write: bool,
    at_once: int,
    opener: Opener,
    out: TextIO,
    err: TextIO,
) -> int:
    """Print a table by form of words and the form that is best. Return the exit status 0.

    options: Options of the fleet.
    prompts: File of questions. None: the bundled ones.
    output: Folder of the answers.
    write: Store the best form in the model's specsot.json. False: only print what would be written.
    at_once: Number of answers that are written concurrently.
    opener: Opens the fleet.
    out: Gets the table.
    err: Gets progress bars.
    Raises InvalidRequest if a running master is named, if the model was taught to plan, if the questions
    cannot be read or are too few, or if the model wrote no plan. Raises ModelError if the model cannot be
    read.

    The fleet is opened only after the questions have been read, and is closed in every case. The last line of
    output says where the form was written, or which JSON --write would write into which file.
    """
    base, text, prompt_builder = open_local(
        options, "plans", "the wording is", "plan, so no wording is needed"
    )
    questions = read_questions(prompts)
    fleet = await opener(options)
    try:
        measurement = Measurement(prompt_builder, text, Answers(fleet, output / ANSWERS_FILE, at_once))
        faults_by_form = await _measure_forms(measurement, questions, err)
    finally:
        await fleet.close()
    best = print_best_form(faults_by_form, out)
    file = folder_of_model(base) / PARTS_FILE
    if write:
        store_form(file, best, faults_by_form)
        out.write(f"written to {file}\n")
    else:
        wording = json.dumps({"wording": {"form": best}})
        out.write(f"for {file}, which --write writes: {wording}\n")
    return 0


async def _measure_forms(
    measurement: Measurement, questions: Sequence[str], err: TextIO
) -> dict[Form, BranchFaults]:
    """Return the faults of every form of words over all questions that the model planned.

    measurement: Plans and writes.
    questions: The words of all questions.
    err: Gets progress bars.

    Questions for which the model planned no points are left out of every form. The result has an entry for
    each of FORMS, also if no question was planned.
    """
    with counting_bar(err, "plans", len(questions)) as advance:

        async def plan_question(question: str) -> PlanToWrite:
            """Return the plan of a question, and advance the progress bar.

            question: The words of the question.
            """
            plan = await measurement.plan(question)
            advance()
            return plan

        plans = [plan for plan in await asyncio.gather(*map(plan_question, questions)) if plan.points]
    with counting_bar(err, "plans written", len(plans) * len(FORMS)) as advance:

        async def write_plan(plan: PlanToWrite, form: Form) -> WrittenPlan:
            """Return a plan written in one form, and advance the progress bar.

            plan: The question and its points.
            form: The form of words.
            """
            written_plans = await measurement.write(plan, form)
            advance()
            return written_plans

        written_plans = await asyncio.gather(*(write_plan(plan, form) for plan in plans for form in FORMS))
    return {form: measure(written_plans[index :: len(FORMS)]) for index, form in enumerate(FORMS)}


# Columns of the table of faults by form of words.
COLUMNS = (
    text("form", "form"),
    figure("branches", "branches", 0),
    figure("words", "words", 0),
    figure("shared openings", "shared_openings"),
    figure("question restated", "restated"),
    figure("4-grams shared", "shared_grams"),
    figure("list inside", "lists"),
    figure("names other points", "other_points"),
    figure("own form", "own_form"),
    figure("off its title", "off_title"),
    figure("one sentence", "short"),
    figure("faults", "total"),
)


def print_best_form(faults_by_form: dict[Form, BranchFaults], out: TextIO) -> Form:
    """Print the table, and return the form with the fewest faults.

    faults_by_form: The faults of each form.
    out: Gets the table.
    Raises InvalidRequest if the model wrote no plan at all.

    The error is raised if no form has any branches; then nothing is printed.
    """
    if not any(faults.branches for faults in faults_by_form.values()):
        raise InvalidRequest("the model wrote no plan of two points to any question", "plans")
    rows = [{"form": form, **asdict(faults)} for form, faults in faults_by_form.items()]
    best = choose_form(faults_by_form)
    out.write(f"{markdown(COLUMNS, rows)}\n\nthe form with the fewest faults is {best}\n")
    return best


def store_form(file: Path, form: Form, faults_by_form: dict[Form, BranchFaults]) -> None:
    """Store the best form and all figures in a model's specsot.json. Other keys of the file stay as they are;
    an absent file is created.

    file: The model's specsot.json.
    form: The form to use.
    faults_by_form: The faults of each form.

    The keys set are "form" and "measured" of the object "wording"; its other keys stay, too. Figures are
    rounded to three decimal places. Raises ValueError if the file is not JSON.
    """
    figures = {name: _rounded(asdict(faults)) for name, faults in faults_by_form.items()}
    store_wording(file, lambda _: {"form": form, "measured": figures})


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """Return the figures, rounded to three decimal places.

    figures: The figures by name.
    """
    return {name: round(value, 3) for name, value in figures.items()}


def read_questions(file: Path | None) -> tuple[str, ...]:
    """Return the distinct questions of a file, in order.

    file: JSON lines with "question". None: the bundled questions.
    Raises InvalidRequest if the file cannot be read, or has fewer than MIN_QUESTIONS questions.

    Blank lines are skipped, and repeated questions count once. A line that is not a JSON object with
    "question" raises InvalidRequest for the whole file. Questions that are not strings are converted.
    """
    rows, source = read_rows(file, "plans.jsonl", question_in)
    questions = tuple(dict.fromkeys(rows))
    if len(questions) < MIN_QUESTIONS:
        raise InvalidRequest(
            f"{source} has {len(questions)} questions; at least {MIN_QUESTIONS} are needed", "prompts"
        )
    return questions
