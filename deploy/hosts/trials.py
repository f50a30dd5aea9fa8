"""Asks one question again and again while something breaks, and holds every answer to the undisturbed one.

A trial brings its steps.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

QUESTION = "Give an overview of Stages of Sleep."
MASTER = "127.0.0.1:50050"
ASKING = ("--mode", "sot", "--max-new-tokens", "600", QUESTION)
WRITTEN = r"master.* finished "  # says the master behind an answer's last token
MIDST = 5  # events after which a trial's first step is taken
TAKEN = "trial: "  # begins a line of ours among those of the services
LIMIT = 600.0  # seconds one answer may take, whatever happens
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

Act = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done during a trial.

    name: In words.
    act: What to do.
    after: Pattern of a service's line to wait for; None: at once.
    """

    name: str
    act: Act
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What happens while an answer is written.

    name: In words.
    steps: In order.
    harmless: No member may be missed for it.
    """

    name: str
    steps: tuple[Step, ...] = ()
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended.

    text: The answer; None: there was none.
    seconds: From the first event.
    silence: The longest time without an event, in seconds.
    error: Why there was no answer; else empty.
    """

    text: str | None
    seconds: float
    silence: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One trial.

    trial: Its name.
    outcome: Outcome of the answer.
    said: Lines of the services while the trial ran, and ours where a step was taken.
    at: When each line came, in seconds since the first step.
    harmless: See `Trial`.
    """

    trial: str
    outcome: Outcome
    said: tuple[str, ...]
    at: tuple[float, ...] = ()
    harmless: bool = False

    @property
    def alarmed(self) -> bool:
        """Return whether a member was missed that only stood still for a moment."""
        return self.harmless and self._first("member lost") is not None

    @property
    def late(self) -> bool:
        """Return whether the answer was written before anything broke: a client may read long after the
        master wrote.
        """
        broke = self._first(TAKEN)
        missed = self._first("member lost")
        written = self._first(WRITTEN)
        return broke is not None and (written is None or written < max(broke, missed or 0))

    def _first(self, pattern: str) -> int | None:
        """Return the number of the first line with the pattern; None if there is none."""
        return next((number for number, line in enumerate(self.said) if re.search(pattern, line)), None)


@dataclass(slots=True)
class Voices:
    """Everything the services say, in order. A line is "service | words".

    times: When each came, by the monotonic clock.
    """

    lines: list[str] = field(default_factory=list[str])
    times: list[float] = field(default_factory=list[float])
    _heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self, process: Process, name: str | None = None) -> None:
        """Record a process's lines until it ends.

        name: Name of a service whose lines do not have it; None: they do.
        """
        async for line in lines_of(process):
            async with self._heard:
                self.say(f"{name} | {line}" if name else line)
                self._heard.notify_all()

    def say(self, line: str) -> None:
        """Record a line with the present time."""
        self.lines.append(line)
        self.times.append(time.monotonic())

    async def until(self, pattern: str, since: int) -> str:
        """Return the first line after the first `since` ones that has the pattern; wait for it if need be."""
        async with self._heard:
            while True:
                found = [line for line in self.lines[since:] if re.search(pattern, line)]
                if found:
                    return found[0]
                await self._heard.wait()


async def run(
    trials: Iterable[Trial],
    specsot: Sequence[str],
    voices: Voices,
    members: int,
    stages: int | None = None,
    asking: Sequence[str] = ASKING,
) -> bool:
    """Run all trials, print them, and return whether all answers are the same.

    trials: What happens while an answer is written.
    specsot: The command, as a client runs it.
    voices: The services' lines.
    members: How many have joined when the ring is complete.
    stages: How many of them have layers; None: any number.
    asking: Arguments of `specsot infer`.
    """
    reports: list[Report] = []
    for trial in (Trial("nothing"), *trials):
        await asyncio.wait_for(until_whole(specsot, members, stages), LIMIT)
        reports.append(await attempt(trial, specsot, voices, asking))
        print("\n".join(("", *told(reports[0], reports[-1]))), flush=True)
        if reports[0].outcome.text is None:
            return False
    print("\n".join(("", *table(reports))), flush=True)
    return all(same(reports[0], report) for report in reports)


async def until_whole(specsot: Sequence[str], members: int, stages: int | None = None) -> None:
    """Wait until the fleet is complete, by asking its master again and again. The arguments are those of
    `run`.
    """
    while True:
        look = await asyncio.create_subprocess_exec(
            *specsot, "info", "--master", MASTER, "--json", stdout=PIPE, stderr=DEVNULL
        )
        words, _ = await look.communicate()
        if look.returncode == 0 and is_whole(json.loads(words), members, stages):
            return


def is_whole(info: dict[str, Any], members: int, stages: int | None) -> bool:
    """Return whether all members have joined, and as many of them as there are stages have layers.

    info: As `specsot info --json` prints it.
    """
    running = [one for one in info["members"] if one["layers"] is not None and one["kind"] == "worker"]
    enough = stages is None or len(running) == stages
    return len(info["members"]) == members and enough and not info["waiting_for"]


async def attempt(
    trial: Trial, specsot: Sequence[str], voices: Voices, asking: Sequence[str] = ASKING
) -> Report:
    """Ask, take the trial's steps while the answer is written, and return the report. The arguments are those
    of `run`.
    """
    since, midst = len(voices.lines), asyncio.Event()
    steps = asyncio.create_task(take(trial, midst, voices, since))
    outcome = await ask(specsot, midst, asking)
    if outcome.text is None:
        midst.set()  # what is broken is healed all the same
    else:
        await asyncio.wait_for(voices.until(WRITTEN, since), LIMIT)
    await asyncio.wait_for(steps, LIMIT)
    said, times = tuple(voices.lines[since:]), voices.times[since:]
    begun = next((at for line, at in zip(said, times) if line.startswith(TAKEN)), times[0] if times else 0.0)
    return Report(trial.name, outcome, said, tuple(at - begun for at in times), trial.harmless)


async def take(trial: Trial, midst: asyncio.Event, voices: Voices, since: int) -> None:
    """Take the trial's steps once `midst` is set, each after the line that it waits for.

    since: Number of earlier lines, which do not count.
    """
    await midst.wait()
    for step in trial.steps:
        if step.after is not None:
            await voices.until(step.after, since)
        voices.say(f"{TAKEN}{step.name}")
        await step.act()


async def ask(specsot: Sequence[str], midst: asyncio.Event, asking: Sequence[str]) -> Outcome:
    """Return how the answer to the question ended, asked by a client of its own; `midst` is set while it is
    written.
    """
    asked = await asyncio.create_subprocess_exec(
        *specsot,
        "infer",
        "--master",
        MASTER,
        "--json",
        *asking,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        limit=1 << 24,
    )
    times, last = list[float](), ""
    try:
        async with asyncio.timeout(LIMIT):
            async for line in lines_of(asked):
                last = line
                times.append(time.monotonic())
                if len(times) == MIDST:
                    midst.set()
    except TimeoutError:
        asked.kill()
        last = f"no answer within {LIMIT:g} s"
    await asked.wait()
    times.append(time.monotonic())
    silences = [later - earlier for earlier, later in pairwise(times)]
    return outcome_of(last, times[-1] - times[0], max(silences))


async def lines_of(process: Process) -> AsyncIterator[str]:
    """Yield a process's lines without colours, until it ends."""
    assert process.stdout is not None
    async for raw in process.stdout:
        yield COLOURS.sub("", raw.decode(errors="replace")).rstrip()


def outcome_of(last: str, seconds: float, silence: float) -> Outcome:
    """Return the outcome by the last line that the client wrote.

    seconds: Seconds of the answer.
    silence: The longest time without an event.
    """
    try:
        event = json.loads(last)
    except ValueError:
        return Outcome(None, seconds, silence, last.strip() or "nothing was said")
    if event.get("event") != "finished":
        return Outcome(None, seconds, silence, f"the answer ended with {event.get('event')}")
    return Outcome(event["text"], seconds, silence)


def same(first: Report, report: Report) -> bool:
    """Return whether the trial's answer is the undisturbed one, although something broke while it was
    written.
    """
    return (
        report.outcome.text is not None
        and report.outcome.text == first.outcome.text
        and not (report.late or report.alarmed)
    )


def verdict(first: Report, report: Report) -> str:
    """Return in words what became of the trial.

    first: The undisturbed report.
    """
    if report.outcome.error:
        return report.outcome.error
    if report.late:
        return "too late: it was written already"
    if report.alarmed:
        return "**a member was missed for nothing**"
    return "identical" if same(first, report) else "**another one**"


def shortened(report: Report) -> list[str]:
    """Return the lines of a report without repeated ones, each with its seconds since the first step."""
    words = [re.sub(r"\d\d:\d\d:\d\d ", "", line) for line in report.said]
    at = [f"{seconds:7.2f} " for seconds in report.at] or [""] * len(words)
    return [f"{at[number]}{line}" for number, line in enumerate(words) if line not in words[:number]]


def told(first: Report, report: Report) -> list[str]:
    """Return the lines about one trial: how it ended, and what each service wrote.

    first: The undisturbed report.
    """
    outcome = report.outcome
    ended = verdict(first, report)
    head = f"== {report.trial}: {ended}, {outcome.seconds:.1f} s, longest silence {outcome.silence:.1f} s"
    return [head, *(f"   {line}" for line in shortened(report))]


def table(reports: Sequence[Report]) -> list[str]:
    """Return a table of all trials, in Markdown.

    reports: The undisturbed one first.
    """
    rows = [
        "| what happened while an answer was written | answer | seconds | longest silence |",
        "|---|---|---|---|",
    ]
    for report in reports:
        times = f"{report.outcome.seconds:.1f} | {report.outcome.silence:.1f}"
        rows.append(f"| {report.trial} | {verdict(reports[0], report)} | {times} |")
    return rows
