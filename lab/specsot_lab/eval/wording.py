"""`specsot eval --plans`: measures in which form of words a model writes the points of a plan best."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final, TextIO, cast

from specsot.checkpoint.resolving import folder_of_model
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import InvalidRequest
from specsot.events import Numbered, Planned
from specsot.params import Ask, Limits, Message, Sampling
from specsot_app.fleet.opening import FleetClient, Opener, final_view
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import figure, markdown, text
from specsot_lab.eval.core.branch_faults import BranchFaults, WrittenPlan, choose_form, measure
from specsot_master.core.limits import LIST_POINT_TOKENS
from specsot_master.core.plans.wording import FORMS, Form
from specsot_master.prompts import PARTS_FILE, ListConversation, Prompts
from specsot_master.text import Text

LEAST_QUESTIONS: Final = 30  # Questions. Fewer do not say which form a model needs. Untuned.
POINTS: Final = 4  # Points of a plan at most. Untuned.
WRITTEN: Final = 3  # Points of a plan that are written; shared openings show in three. Bounds the run.
POINT_TOKENS: Final = 128  # Tokens of a branch; two or three sentences take about 60. A bound.
ANSWERS: Final = "wordings.jsonl"  # In the output folder: every answer, from which a run is continued.


@dataclass(frozen=True, slots=True)
class PlanToWrite:
    """A question with the points that the model planned for it."""

    question: str
    points: tuple[Point, ...]


class Answers:
    """Answers that a fleet writes to prompts given in tokens, greedily; each is stored in a file at once.

    fleet: the client. file: of earlier answers, which are not asked for again. at_once: answers that are
        written at a time.
    """

    def __init__(self, fleet: FleetClient, file: Path, at_once: int) -> None:
        self._fleet = fleet
        self._file = file
        self._places = asyncio.Semaphore(at_once)
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = read_rows(file)
        self._known = {row["prompt"]: row["text"] for row in rows if row["prompt"]}
        self._plans: dict[str, list[str]] = {row["question"]: row["plan"] for row in rows if "plan" in row}

    async def plan(self, question: str) -> tuple[Point, ...]:
        """Return the points of a planned answer, of which only the plan is written; none if the model planned
        nothing.
        """
        if question not in self._plans:
            ask = Ask(prompt=question, mode="sot", limits=Limits(max_new_tokens=POINTS * LIST_POINT_TOKENS))
            async with self._places:
                self._plans[question] = await self._first_plan(ask)
            self._keep({"prompt": "", "question": question, "plan": self._plans[question]})
        return tuple(Point(id, 1, title) for id, title in enumerate(self._plans[question], 1))

    async def _first_plan(self, ask: Ask) -> list[str]:
        """Return the titles of a plan; leaving its events behind cancels the request."""
        async with aclosing(cast("AsyncGenerator[Numbered]", self._fleet.generate(ask))) as events:
            async for numbered in events:
                if isinstance(numbered.event, Planned):
                    return [point.title for point in numbered.event.points]
        return []

    async def write(self, tokens: Sequence[int], limit: int, **about: Any) -> str:
        """Return the answer to a prompt, from the file if it was answered before.

        tokens: token ids. limit: tokens of the answer. about: what the file says of it.
        """
        prompt = hashlib.sha256(json.dumps([list(tokens), limit]).encode()).hexdigest()[:16]
        if prompt not in self._known:
            ask = Ask(
                tokens=tuple(tokens),
                mode="direct",
                sampling=Sampling(),
                limits=Limits(max_new_tokens=limit),
            )
            async with self._places:
                view = await final_view(self._fleet, ask)
            self._known[prompt] = view.finished.text if view.finished else ""
            self._keep({"prompt": prompt, **about, "text": self._known[prompt]})
        return self._known[prompt]

    def _keep(self, row: Mapping[str, Any]) -> None:
        """Append a row to the file."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the answers in a file; a last line that was cut off is left out."""
    if not file.exists():
        return []
    complete_lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in complete_lines]


class Measurement:
    """One run over a model: plans of all questions, then their points in every form.

    prompts: has the model's wording. text: the tokenizer. answers: asks the fleet.
    """

    def __init__(self, prompts: Prompts, text: Text, answers: Answers) -> None:
        self._wording = prompts.wording
        self._text = text
        self._answers = answers
        self._rules = PlanRules(direct=False, max_points=POINTS, listed=True)

    async def plan(self, question: str) -> PlanToWrite:
        """Return the points that the product keeps of the model's list."""
        return PlanToWrite(question, await self._answers.plan(question))

    async def write(self, plan: PlanToWrite, form: Form) -> WrittenPlan:
        """Return the plan with the texts that the model writes in this form."""
        turns = self._turns(plan.question, form)
        texts = [
            self._answers.write(
                turns.branch(point, plan.points, [], POINT_TOKENS).tokens,
                POINT_TOKENS,
                question=plan.question,
                form=form,
                title=point.title,
            )
            for point in plan.points[:WRITTEN]
        ]
        titles = tuple(point.title for point in plan.points[:WRITTEN])
        # A branch of an article may continue with the next heading, before which the product ends it.
        sections = (text.partition("\n#")[0].strip() for text in await asyncio.gather(*texts))
        return WrittenPlan(plan.question, titles, tuple(sections))

    def _turns(self, question: str, form: Form) -> ListConversation:
        """Return the conversation that asks for the points of a question in this form."""
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
    """Print a table by form and the form that is best; return the exit status 0.

    options: of the fleet. prompts: file of questions; None: the bundled ones. output: folder of the answers.
        write: store the form in the model's specsot.json. at_once: answers written at a time. opener: opens
        the fleet. out: gets the table. err: shows bars.
    Raises InvalidRequest, ModelError.
    """
    if options.master is not None:
        raise InvalidRequest("the wording is kept beside a model here, so there is no --master", "plans")
    base = models_of(options).base
    text = Text(base)
    asker = Prompts(base, text)
    if not asker.listed:
        raise InvalidRequest(f"{base} was taught to plan, so it is asked in no words of ours", "plans")
    questions = read_questions(prompts)
    fleet = await opener(options)
    try:
        run = Measurement(asker, text, Answers(fleet, output / ANSWERS, at_once))
        faults_by_form = await _measure_forms(run, questions, err)
    finally:
        await fleet.close()
    best = show(faults_by_form, out)
    file = folder_of_model(base) / PARTS_FILE
    if write:
        store_form(file, best, faults_by_form)
        out.write(f"written to {file}\n")
    else:
        wording = json.dumps({"wording": {"form": best}})
        out.write(f"for {file}, which --write writes: {wording}\n")
    return 0


async def _measure_forms(run: Measurement, questions: Sequence[str], err: TextIO) -> dict[Form, BranchFaults]:
    """Return the faults of every form over all questions. run: asks the fleet. err: shows bars."""
    with counting_bar(err, "plans", len(questions)) as advance:

        async def planned(question: str) -> PlanToWrite:
            """Return the plan of a question, and advance the bar."""
            plan = await run.plan(question)
            advance()
            return plan

        plans = [plan for plan in await asyncio.gather(*map(planned, questions)) if plan.points]
    with counting_bar(err, "plans written", len(plans) * len(FORMS)) as advance:

        async def written(plan: PlanToWrite, form: Form) -> WrittenPlan:
            """Return a plan written in a form, and advance the bar."""
            written_plans = await run.write(plan, form)
            advance()
            return written_plans

        written_plans = await asyncio.gather(*(written(plan, form) for plan in plans for form in FORMS))
    return {form: measure(written_plans[index :: len(FORMS)]) for index, form in enumerate(FORMS)}


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


def show(faults_by_form: dict[Form, BranchFaults], out: TextIO) -> Form:
    """Print the table, and return the best form. Raises InvalidRequest if the model wrote no plan."""
    if not any(faults.branches for faults in faults_by_form.values()):
        raise InvalidRequest("the model wrote no plan of two points to any question", "plans")
    rows = [{"form": form, **asdict(faults)} for form, faults in faults_by_form.items()]
    best = choose_form(faults_by_form)
    out.write(f"{markdown(COLUMNS, rows)}\n\nthe form with the fewest faults is {best}\n")
    return best


def store_form(file: Path, form: Form, faults_by_form: dict[Form, BranchFaults]) -> None:
    """Put the form and what was measured into a model's specsot.json; its other keys stay as they are."""
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    figures = {name: _rounded(asdict(faults)) for name, faults in faults_by_form.items()}
    wording = {**stored.get("wording", {}), "form": form, "measured": figures}
    file.write_text(
        json.dumps({**stored, "wording": wording}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """Return the figures, rounded to three digits."""
    return {name: round(value, 3) for name, value in figures.items()}


def read_questions(file: Path | None) -> tuple[str, ...]:
    """Return the questions of a file of JSON lines, or the bundled ones. Raises InvalidRequest, also for
    fewer questions than say which form is best.
    """
    source = file or resources.files("specsot_lab.eval") / "data" / "plans.jsonl"
    try:
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]
        questions = tuple(dict.fromkeys(str(row["question"]) for row in rows))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{source}: {type(error).__name__}: {error}", "prompts") from None
    if len(questions) < LEAST_QUESTIONS:
        raise InvalidRequest(
            f"{source} has {len(questions)} questions; at least {LEAST_QUESTIONS} are needed", "prompts"
        )
    return questions
