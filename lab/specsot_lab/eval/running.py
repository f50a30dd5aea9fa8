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
    sum_up,
)
from specsot_lab.eval.records import (
    Folder,
    Key,
    Record,
    about,
    answer_to,
    append,
    is_broken_off,
    key_of,
    read_records,
    served_by,
    settings_of,
)
from specsot_lab.eval.tasks import Prompt, score

DIRECT = "#8c96a3"


def plot(lines: Sequence[CategoryRow], file: Path) -> None:
    """One PNG: a row for each category. Raises InvalidRequest."""
    size = 9.2, 1.8 + 0.42 * len(lines)
    with picture(file, "Planned answers against direct ones", size, 2, sharey=True) as panels:
        fill(panels, lines)


def fill(panels: Sequence[Any], lines: Sequence[CategoryRow]) -> None:
    names = [f"{one.task}: {one.category.removeprefix(f'{one.task}/')} ({one.questions})" for one in lines]
    speedups = [line.speedup for line in lines]
    bars(panels[0], names, speedups, [f"{speedup:.2f}" for speedup in speedups])
    panels[0].axvline(1, color="black", linewidth=0.8)
    panels[0].axvline(SLOWER, color="black", linewidth=0.8, linestyle=":", label=f"pays from {SLOWER}")
    panels[0].set_title("tokens per second, planned over direct", fontsize="medium")
    _fill_quality(panels[1], lines)


def _fill_quality(panel: Any, lines: Sequence[CategoryRow]) -> None:
    """Of both; nothing where a task has no score."""
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
WARM = Prompt("", "", "", ("Explain how to plan a day, point by point.",))
WARM_TOKENS = 64
NO_PLOT = "no plot: matplotlib, which draws it, is not installed"

Draw = Callable[[Sequence[CategoryRow], Path, TextIO], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt in one mode. options: of this request. name: of its record; "": the mode."""

    prompt: Prompt
    mode: Mode
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> Key:
        return key_of(about(self.prompt, self.mode) | {"mode": self.name or self.mode})


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
        """Raises ModelError."""
        return settings_of(self.wanted, self.tokens) | {"at_once": self.at_once, **self.request}

    def check(self) -> None:
        """Raises InvalidRequest where the folder's records were asked for with other settings, ModelError."""
        self.folder.check(self.settings)

    def say(self, *lines: str) -> None:
        self.out.writelines(f"{line}\n" for line in lines)

    def complain(self, records: Sequence[Record]) -> None:
        """A line for every answer that was not had."""
        for one in records:
            if "error" in one:
                self.say(f"not answered: {one['task']} {one['id']} ({one['mode']}): {one['error']}")

    def write(self, bench: str, rows: Sequence[Row], file: Path | None = None, **settings: Any) -> None:
        """file: if not BENCH.json; with the settings that the folder's records have."""
        path = file or self.folder.path / f"{bench}.json"
        write_results(path, bench, self.folder.settings() | settings, rows)

    async def answers(self, asked: Sequence[Asked], wanted: FleetOptions | None = None) -> list[Record]:
        """To everything that is asked, in order; what is in the folder is not asked again. wanted: another
        fleet than the run's, which differs in what `Asked.name` says.
        """
        read = read_records(self.folder.records)
        kept = {key_of(record): record for record in read if not is_broken_off(record)}
        left = [one for one in asked if one.key not in kept]
        if left:
            fleet = await self.opener(wanted or self.wanted)
            try:
                self.folder.begin(self.settings | await served_by(fleet, self.wanted))
                with counting_bar(self.err, "answers", len(left)) as count:
                    waiting = iter(left)

                    async def client() -> None:
                        for one in waiting:
                            kept[one.key] = await self._answer(fleet, one)
                            append(self.folder.records, kept[one.key])
                            count()

                    await _until_first_error([client() for _ in range(self.at_once)])
            finally:
                await fleet.close()
        return [kept[one.key] for one in asked]

    async def _answer(self, fleet: FleetClient, one: Asked) -> Record:
        limits = {"max_new_tokens": self.tokens, **self.request, **one.options}
        told = await answer_to(fleet, one.prompt, one.mode, request_with(self.wanted.preset, limits))
        return told | {"mode": one.name or one.mode}


def plot_of(lines: Sequence[CategoryRow], file: Path, out: TextIO) -> None:
    try:
        plot(lines, file)
    except InvalidRequest:
        out.write(f"{NO_PLOT}\n")


async def evaluate(run: Run, draw: Draw = plot_of, modes: Sequence[Mode] = MODES) -> int:
    """Ask what is not in the folder yet; then show the whole. 1 where nothing can be told.

    modes: MODES, or "direct" alone: then there is a table of the direct answers, and no plot.
    Raises InvalidRequest where the folder's records were asked for with other settings.
    """
    run.check()
    asked = [Asked(prompt, mode) for prompt in run.prompts for mode in modes]
    told = await run.answers(asked)
    records = [_scored(one.prompt, one.mode, record) for one, record in zip(asked, told)]
    if "sot" not in modes:
        return show_direct(run, records)
    lines = sum_up(pairs_of(records))
    run.say(page_of(lines))
    if run.wanted.model is None and run.wanted.master is None:
        run.say(OF_THE_DEMO)
    run.complain(records)
    run.write("eval", named([line.row for line in lines], "task", "category"), run.folder.summary)
    draw(lines, run.folder.plot, run.out)
    return 0 if lines else 1


def show_direct(run: Run, records: Sequence[Record]) -> int:
    """The table of answers without plans. 1 if there are none."""
    lines = direct_lines(records)
    run.say(direct_page(lines))
    run.complain(records)
    run.write("eval", named(lines, "task", "category"), run.folder.summary)
    return 0 if lines else 1


def warmed(opener: Opener) -> Opener:
    """A fleet's first answers are slow; these ones are not counted."""

    async def opened(wanted: FleetOptions) -> FleetClient:
        fleet = await opener(wanted)
        try:
            for mode in MODES:
                await answer_to(fleet, WARM, mode, {"max_new_tokens": WARM_TOKENS})
        except BaseException:
            await fleet.close()
            raise
        return fleet

    return opened


async def _until_first_error(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Side by side; the first error ends them all."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _scored(prompt: Prompt, mode: Mode, record: Record) -> Record:
    """By the references that the prompt has now; they may have been corrected since it was answered."""
    turns = record["turns"]
    return record | about(prompt, mode) | {"scores": score(prompt, turns[0]["text"]) if turns else {}}
