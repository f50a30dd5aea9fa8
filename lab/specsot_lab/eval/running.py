"""`specsot eval`: asks every prompt directly and with a plan, and shows what came."""

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
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import Row
from specsot_bench.plots import SAME, bars, picture
from specsot_bench.results import named, write_results
from specsot_lab.eval.aggregate import (
    SLOWER,
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

# Colour of direct answers.
DIRECT = "#8c96a3"


def plot(lines: Sequence[CategoryRow], file: Path) -> None:
    """Write one PNG with a row for each category. Raises InvalidRequest if matplotlib is not installed."""
    size = 9.2, 1.8 + 0.42 * len(lines)
    with picture(file, "Planned answers against direct ones", size, 2, sharey=True) as panels:
        fill(panels, lines)


def fill(panels: Sequence[Any], lines: Sequence[CategoryRow]) -> None:
    """Draw speedups on the first panel and quality on the second. panels: matplotlib's axes. lines: the
    categories.
    """
    names = [f"{one.task}: {one.category.removeprefix(f'{one.task}/')} ({one.questions})" for one in lines]
    speedups = [line.speedup for line in lines]
    bars(panels[0], names, speedups, [f"{speedup:.2f}" for speedup in speedups])
    panels[0].axvline(1, color="black", linewidth=0.8)
    panels[0].axvline(SLOWER, color="black", linewidth=0.8, linestyle=":", label=f"pays from {SLOWER}")
    panels[0].set_title("tokens per second, planned over direct", fontsize="medium")
    _fill_quality(panels[1], lines)


def _fill_quality(panel: Any, lines: Sequence[CategoryRow]) -> None:
    """Draw the quality of both kinds of answers; "not scored" where a task has no score. panel: matplotlib's
    axes.
    """
    for offset, name, colour in ((-0.2, "direct", DIRECT), (0.2, "sot", SAME)):
        values = [getattr(line, f"{name}_quality") or 0 for line in lines]
        panel.barh([row + offset for row in range(len(lines))], values, 0.36, color=colour, label=name)
    for row, line in enumerate(lines):
        if line.direct_quality is None:
            panel.text(0.01, row, "not scored", va="center", color=DIRECT)
    panel.set_xlim(0, 1)
    panel.set_title("quality, the task's own score", fontsize="medium")


MODES: tuple[Mode, ...] = ("direct", "sot")
OF_THE_DEMO = (
    "The demo model babbles outside its topics: its quality here means nothing, only its speed does."
)
# A prompt whose answers are not counted.
WARM = Prompt("", "", "", ("Explain how to plan a day, point by point.",))
# Tokens of an answer that is not counted.
WARM_TOKENS = 64
NO_PLOT = "no plot: matplotlib, which draws it, is not installed"

Draw = Callable[[Sequence[CategoryRow], Path, TextIO], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt in one mode. prompt: what is asked. mode: how it is answered. name: of its record; empty:
    the mode. options: of this request alone.
    """

    prompt: Prompt
    mode: Mode
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> Key:
        """Return the key of this prompt's record, by which it is found again."""
        return key_of(record_head(self.prompt, self.mode) | {"mode": self.name or self.mode})


@dataclass(frozen=True, slots=True)
class Run:
    """What is asked of whom, and where it is kept. tokens: of an answer, at most. at_once: answers that are
    written side by side; only one at a time is timed as a user would wait for it.

    What `request` says, and a preset in `wanted` of requests, holds for every one of them.
    """

    prompts: Sequence[Prompt]
    wanted: FleetOptions
    tokens: int
    folder: Folder
    opener: Opener
    out: TextIO
    err: TextIO
    at_once: int = 1
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings with which records are asked for. Raises ModelError."""
        return settings_of(self.wanted, self.tokens) | {"at_once": self.at_once, **self.request}

    def check(self) -> None:
        """Raise InvalidRequest if the folder's records were asked for with other settings; ModelError if they
        cannot be read.
        """
        self.folder.check(self.settings)

    def say(self, *lines: str) -> None:
        """Write lines to the output."""
        self.out.writelines(f"{line}\n" for line in lines)

    def complain(self, records: Sequence[Record]) -> None:
        """Write a line for every record without an answer."""
        for record in records:
            if "error" in record:
                self.say(
                    f"not answered: {record['task']} {record['id']} ({record['mode']}): {record['error']}"
                )

    def write(self, bench: str, rows: Sequence[Row], file: Path | None = None, **settings: Any) -> None:
        """Write rows to a file as JSON, with the settings of the folder's records.

        bench: name of the measurement. rows: figures by name. file: None: BENCH.json in the folder. settings:
            further ones.
        """
        path = file or self.folder.path / f"{bench}.json"
        write_results(path, bench, self.folder.settings() | settings, rows)

    async def answers(self, questions: Sequence[Asked], options: FleetOptions | None = None) -> list[Record]:
        """Return the records of everything that is asked, in order; what is in the folder is not asked again.

        questions: prompts with mode and options. options: another fleet than the run's, which differs in what
            `Asked.name` says; None: the run's.
        """
        read = read_records(self.folder.records)
        records = {key_of(record): record for record in read if not is_broken_off(record)}
        missing = [question for question in questions if question.key not in records]
        if missing:
            fleet = await self.opener(options or self.wanted)
            try:
                self.folder.begin(self.settings | await served_by(fleet, self.wanted))
                with counting_bar(self.err, "answers", len(missing)) as advance:
                    waiting = iter(missing)

                    async def client() -> None:
                        """Ask the next missing question until there is none."""
                        for question in waiting:
                            records[question.key] = await self._answer(fleet, question)
                            append(self.folder.records, records[question.key])
                            advance()

                    await _run_until_first_error([client() for _ in range(self.at_once)])
            finally:
                await fleet.close()
        return [records[question.key] for question in questions]

    async def _answer(self, fleet: FleetClient, question: Asked) -> Record:
        """Return the record of one question, under the question's name or mode."""
        limits = {"max_new_tokens": self.tokens, **self.request, **question.options}
        record = await answer_to(
            fleet, question.prompt, question.mode, request_with(self.wanted.preset, limits)
        )
        return record | {"mode": question.name or question.mode}


def plot_of(lines: Sequence[CategoryRow], file: Path, out: TextIO) -> None:
    """Write the plot, or a line if matplotlib is not installed. file: the PNG. out: gets the line."""
    try:
        plot(lines, file)
    except InvalidRequest:
        out.write(f"{NO_PLOT}\n")


async def evaluate(run: Run, draw: Draw = plot_of, modes: Sequence[Mode] = MODES) -> int:
    """Ask what is not in the folder yet; then show everything. Return 1 if there is no result, else 0.

    run: what is asked, of which fleet. draw: draws the plot.
    modes: MODES, or "direct" alone: then there is a table of the direct answers, and no plot.
    Raises InvalidRequest if the folder's records were asked for with other settings.
    """
    run.check()
    questions = [Asked(prompt, mode) for prompt in run.prompts for mode in modes]
    answers = await run.answers(questions)
    records = [
        _scored(question.prompt, question.mode, record) for question, record in zip(questions, answers)
    ]
    if "sot" not in modes:
        return show_direct(run, records)
    lines = rows_by_category(pairs_of(records))
    run.say(page_of(lines))
    if run.wanted.model is None and run.wanted.master is None:
        run.say(OF_THE_DEMO)
    run.complain(records)
    run.write("eval", named([line.row for line in lines], "task", "category"), run.folder.summary)
    draw(lines, run.folder.plot, run.out)
    return 0 if lines else 1


def show_direct(run: Run, records: Sequence[Record]) -> int:
    """Write the table of answers without plans; return 1 if there are none, else 0."""
    lines = direct_lines(records)
    run.say(direct_page(lines))
    run.complain(records)
    run.write("eval", named(lines, "task", "category"), run.folder.summary)
    return 0 if lines else 1


def with_warm_up(opener: Opener) -> Opener:
    """Return an opener whose fleet has already answered once in each mode, since a fleet's first answers are
    slow.
    """

    async def opened(options: FleetOptions) -> FleetClient:
        """Open the fleet, let it answer, and return it."""
        fleet = await opener(options)
        try:
            for mode in MODES:
                await answer_to(fleet, WARM, mode, {"max_new_tokens": WARM_TOKENS})
        except BaseException:
            await fleet.close()
            raise
        return fleet

    return opened


async def _run_until_first_error(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; the first error cancels all of them and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _scored(prompt: Prompt, mode: Mode, record: Record) -> Record:
    """Return a record with the scores by the references that the prompt has now, which may have been
    corrected since it was answered.
    """
    turns = record["turns"]
    return record | record_head(prompt, mode) | {"scores": score(prompt, turns[0]["text"]) if turns else {}}
