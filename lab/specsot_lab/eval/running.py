"""`specsot eval`: asks every prompt directly and with a plan, and shows the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from specsot.errors import InvalidRequest
from specsot.params import Mode
from specsot_app.core.ask import request_with
from specsot_app.fleet.opening import FleetClient, Opener
from specsot_app.fleet.options import FleetOptions
from specsot_bench.asking import counting_bar
from specsot_bench.core.tables import Row
from specsot_bench.plots import SAME, bars, picture
from specsot_bench.results import named, write_results
from specsot_lab.eval.aggregate import (
    MIN_SPEEDUP,
    CategoryRow,
    direct_lines,
    direct_page,
    page_of,
    pairs_of,
    rows_by_category,
)
from specsot_lab.eval.records import (
    Folder,
    Key,
    Record,
    answer_to,
    append,
    is_broken_off,
    key_of,
    read_records,
    record_head,
    served_by,
    settings_of,
)
from specsot_lab.eval.tasks import Prompt, score

# Colour of direct answers in the plot.
DIRECT_COLOUR = "#8c96a3"


def plot(lines: Sequence[CategoryRow], file: Path) -> None:
    """Write a PNG that has a row for each category.

    lines: The rows of `rows_by_category`.
    file: The PNG.
    Raises InvalidRequest if matplotlib is not installed.

    The left panel has the speedups, and the right one the quality. An existing file is replaced.
    """
    size = 9.2, 1.8 + 0.42 * len(lines)
    with picture(file, "Planned answers against direct ones", size, 2, sharey=True) as panels:
        draw_panels(panels, lines)


def draw_panels(panels: Sequence[Any], lines: Sequence[CategoryRow]) -> None:
    """Draw the speedups into the first panel and the quality into the second one.

    panels: Two axes of matplotlib.
    lines: The rows of `rows_by_category`.

    The left panel has a bar for each category, and lines at a speedup of 1 and of MIN_SPEEDUP.
    """
    names = [
        f"{line.task}: {line.category.removeprefix(f'{line.task}/')} ({line.questions})" for line in lines
    ]
    speedups = [line.speedup for line in lines]
    bars(panels[0], names, speedups, [f"{speedup:.2f}" for speedup in speedups])
    panels[0].axvline(1, color="black", linewidth=0.8)
    panels[0].axvline(
        MIN_SPEEDUP, color="black", linewidth=0.8, linestyle=":", label=f"profitable from {MIN_SPEEDUP}"
    )
    panels[0].set_title("tokens per second, planned over direct", fontsize="medium")
    _draw_quality(panels[1], lines)


def _draw_quality(panel: Any, lines: Sequence[CategoryRow]) -> None:
    """Draw the quality of direct and planned answers. A category whose task has no score is labelled "not
    scored".

    panel: The axes of matplotlib.
    lines: The rows of `rows_by_category`.

    A missing quality has a bar of length 0. The scale is 0 to 1.
    """
    for offset, name, colour in ((-0.2, "direct", DIRECT_COLOUR), (0.2, "sot", SAME)):
        values = [getattr(line, f"{name}_quality") or 0 for line in lines]
        panel.barh([row + offset for row in range(len(lines))], values, 0.36, color=colour, label=name)
    for row, line in enumerate(lines):
        if line.direct_quality is None:
            panel.text(0.01, row, "not scored", va="center", color=DIRECT_COLOUR)
    panel.set_xlim(0, 1)
    panel.set_title("quality, the task's own score", fontsize="medium")


# The modes that are compared.
MODES: tuple[Mode, ...] = ("direct", "sot")
# Line below the table if the demo model answered.
DEMO_NOTE = "The demo model babbles outside its topics: its quality here means nothing, only its speed does."
# A prompt whose answers are not counted.
WARM_UP_PROMPT = Prompt("", "", "", ("Explain how to plan a day, point by point.",))
# Tokens. Maximum length of an answer that is not counted. Untuned.
WARM_UP_TOKENS = 64
# Line that replaces the plot if it cannot be drawn.
NO_PLOT_NOTE = "no plot: matplotlib, which draws it, is not installed"

# Draws the plot of some rows into a file, or writes to the output why it cannot.
Draw = Callable[[Sequence[CategoryRow], Path, TextIO], None]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt that is to be answered in one mode.

    prompt: The questions.
    mode: How the questions are answered.
    name: Mode under which the record is stored. Empty: the name of `mode`. Requests of one prompt in one mode
        need different names, such as "sampled 1".
    options: Options of this request alone, by name. They replace those of the run.
    """

    prompt: Prompt
    mode: Mode
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> Key:
        """Return the key of this request's record, by which a later run finds the record."""
        return key_of(record_head(self.prompt, self.mode) | {"mode": self.name or self.mode})


@dataclass(frozen=True, slots=True)
class Run:
    """The prompts of an evaluation, the fleet that answers them, and the folder that stores the answers.

    prompts: The prompts.
    fleet_options: Options of the fleet. Their preset of requests applies to every request.
    max_tokens: Maximum number of tokens of an answer.
    folder: Folder that stores settings, answers and results.
    opener: Opens a fleet of given options, and returns its client.
    out: Gets the tables.
    err: Gets the progress bar.
    at_once: Number of answers that are written concurrently. Only at 1 the times are those that a single
        client would see.
    request: Options of every request, by name, which replace those of the preset.
    """

    prompts: Sequence[Prompt]
    fleet_options: FleetOptions
    max_tokens: int
    folder: Folder
    opener: Opener
    out: TextIO
    err: TextIO
    at_once: int = 1
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of this run's records, by name.

        Raises ModelError if a model of the fleet's options cannot be found or read.
        """
        return settings_of(self.fleet_options, self.max_tokens) | {"at_once": self.at_once, **self.request}

    def check(self) -> None:
        """Return if this run may add its records to the folder.

        Raises InvalidRequest if the folder's records were asked for with other settings, ModelError if the
        stored settings or a model cannot be read.
        """
        self.folder.check(self.settings)

    def write_lines(self, *lines: str) -> None:
        """Write lines to the output.

        lines: The lines, without their ends.
        """
        self.out.writelines(f"{line}\n" for line in lines)

    def report_unanswered(self, records: Sequence[Record]) -> None:
        """Write a line for each record that has an error; nothing if every prompt was answered.

        records: The records of the run.

        A line has the record's task, id, mode and error.
        """
        for record in records:
            if "error" in record:
                self.write_lines(
                    f"not answered: {record['task']} {record['id']} ({record['mode']}): {record['error']}"
                )

    def write(self, bench: str, rows: Sequence[Row], file: Path | None = None, **settings: Any) -> None:
        """Write rows to a file as JSON, together with the settings of the folder's records.

        bench: Name of the measurement.
        rows: The figures, by name.
        file: The file. None: the file that is named after the measurement in the run's folder.
        settings: Further settings of the measurement, by name.
        Raises ModelError if the folder has no settings yet.
        """
        path = file or self.folder.path / f"{bench}.json"
        write_results(path, bench, self.folder.settings() | settings, rows)

    async def answers(self, questions: Sequence[PromptRequest]) -> list[Record]:
        """Return the records of all requests, in their order. Prompts whose record is in the folder are not
        asked again, unless the fleet had failed to finish the answer. No fleet is opened if nothing is
        missing.

        questions: The requests, each with a key of its own.
        Raises InvalidRequest if the folder has records of other settings.

        A record of a request that the fleet refused counts as an answer, and is not asked again. The settings
        are stored when the fleet is open, before the first answer. Each record is appended to the folder's
        file as soon as it is complete; at most `at_once` requests run at once. The first error ends all
        requests and is raised, after the fleet has been closed.
        """
        read = read_records(self.folder.records)
        records = {key_of(record): record for record in read if not is_broken_off(record)}
        missing = [question for question in questions if question.key not in records]
        if missing:
            fleet = await self.opener(self.fleet_options)
            try:
                self.folder.begin(self.settings | await served_by(fleet, self.fleet_options))
                with counting_bar(self.err, "answers", len(missing)) as advance:
                    waiting = iter(missing)

                    async def client() -> None:
                        """Ask the next missing question and store its record, until no question is left."""
                        for question in waiting:
                            records[question.key] = await self._answer(fleet, question)
                            append(self.folder.records, records[question.key])
                            advance()

                    await _run_until_first_error([client() for _ in range(self.at_once)])
            finally:
                await fleet.close()
        return [records[question.key] for question in questions]

    async def _answer(self, fleet: FleetClient, question: PromptRequest) -> Record:
        """Return the record of one request, stored under its name, or under its mode if it has no name.

        fleet: Client of the open fleet.
        question: The request.

        The request's own options replace those of the run, and these replace those of the preset. A refused
        or broken-off answer is a record with "error"; other errors of the fleet are raised.
        """
        limits = {"max_new_tokens": self.max_tokens, **self.request, **question.options}
        record = await answer_to(
            fleet, question.prompt, question.mode, request_with(self.fleet_options.preset, limits)
        )
        return record | {"mode": question.name or question.mode}


def draw_plot(lines: Sequence[CategoryRow], file: Path, out: TextIO) -> None:
    """Write the plot, or a line to the output if matplotlib is not installed.

    lines: The rows of `rows_by_category`.
    file: The PNG.
    out: Gets the line.

    Any other error of drawing is raised.
    """
    try:
        plot(lines, file)
    except InvalidRequest:
        out.write(f"{NO_PLOT_NOTE}\n")


async def evaluate(run: Run, draw: Draw = draw_plot, modes: Sequence[Mode] = MODES) -> int:
    """Ask the questions that have no record in the folder yet, then show the results of all. Return 1 if
    there is no result, else 0.

    run: The prompts, the fleet and the folder.
    draw: Draws the plot.
    modes: MODES, or "direct" alone: then a table of the direct answers is shown, and no plot is drawn.
    Raises InvalidRequest if the folder's records were asked for with other settings, ModelError if the stored
    settings or a model cannot be read.

    A prompt that was not answered has a line of its own in the output and does not count. A note is added if
    the demo model answered.
    """
    run.check()
    questions = [PromptRequest(prompt, mode) for prompt in run.prompts for mode in modes]
    answers = await run.answers(questions)
    records = [
        _scored(question.prompt, question.mode, record) for question, record in zip(questions, answers)
    ]
    if "sot" not in modes:
        return show_direct(run, records)
    lines = rows_by_category(pairs_of(records))
    run.write_lines(page_of(lines))
    if run.fleet_options.model is None and run.fleet_options.master is None:
        run.write_lines(DEMO_NOTE)
    run.report_unanswered(records)
    run.write("eval", named([line.row for line in lines], "task", "category"), run.folder.summary)
    draw(lines, run.folder.plot, run.out)
    return 0 if lines else 1


def show_direct(run: Run, records: Sequence[Record]) -> int:
    """Write the table of answers without plans. Return 1 if no prompt was answered, else 0.

    run: The run, which gets the table and stores the summary.
    records: The records of the direct answers.

    A line for each record with an error follows the table. The summary is written also if there is no result.
    """
    lines = direct_lines(records)
    run.write_lines(direct_page(lines))
    run.report_unanswered(records)
    run.write("eval", named(lines, "task", "category"), run.folder.summary)
    return 0 if lines else 1


def with_warm_up(opener: Opener) -> Opener:
    """Return an opener whose fleet has already answered once in each of MODES, because the first answers of a
    fleet are slow.

    opener: Opens the fleet.

    The answers that it gives before have at most WARM_UP_TOKENS tokens and are not recorded. A request that
    is refused does not fail.
    """

    async def opened(options: FleetOptions) -> FleetClient:
        """Open the fleet, let it answer, and return its client. If that fails, close the fleet and raise the
        error.

        options: Options of the fleet.
        """
        fleet = await opener(options)
        try:
            for mode in MODES:
                await answer_to(fleet, WARM_UP_PROMPT, mode, {"max_new_tokens": WARM_UP_TOKENS})
        except BaseException:
            await fleet.close()
            raise
        return fleet

    return opened


async def _run_until_first_error(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently until all are done. The first error cancels all others and is raised.

    coroutines: The coroutines.

    Returns when all tasks have ended, also the cancelled ones. Without coroutines it returns at once.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _scored(prompt: Prompt, mode: Mode, record: Record) -> Record:
    """Return a record with scores by the present references of its prompt, which may have been corrected
    since the answer was stored. Scores are empty if no turn was answered.

    prompt: The prompt as the task's file has it now.
    mode: The mode in which the prompt was asked.
    record: The stored record.
    """
    turns = record["turns"]
    return record | record_head(prompt, mode) | {"scores": score(prompt, turns[0]["text"]) if turns else {}}
