"""Asks one question again and again while something breaks; compares each answer with the undisturbed one.

A trial consists of steps that break something, and repair it.
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

# Question of every trial.
QUESTION = "Give an overview of Stages of Sleep."
# Address of the fleet's master.
MASTER = "127.0.0.1:50050"
# Arguments of `specsot infer`.
DEFAULT_REQUEST = ("--mode", "sot", "--max-new-tokens", "600", QUESTION)
ANSWER_FINISHED = r"master.* finished "  # Pattern of the master's line after an answer's last token.
FIRST_STEP_EVENTS = 5  # Events of the answer after which a trial's first step runs. Untuned.
STEP_PREFIX = "trial: "  # Beginning of a line that records a step among the lines of the services.
LIMIT = 600.0  # Seconds. Bounds an answer, and every wait for a line. Untuned.
# Matches a colour code of a terminal.
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# Coroutine function that does something to the fleet.
Act = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done during a trial.

    name: Name of the step, in words.
    act: Coroutine function that does it.
    after: Pattern of a service's line to wait for; None: the step runs at once.
    """

    name: str
    act: Act
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What happens while an answer is written.

    name: What happens, in words.
    steps: Steps, in order; empty: the answer is undisturbed.
    harmless: True if no member may be declared lost because of it.
    """

    name: str
    steps: tuple[Step, ...] = ()
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended.

    text: The merged text; None: there was no answer.
    seconds: Seconds from the first event to the end.
    silence: Longest time between two events, in seconds.
    error: Reason why there was no answer; empty if there was one.
    """

    text: str | None
    seconds: float
    silence: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one trial.

    trial: Name of the trial.
    outcome: Outcome of the answer.
    lines: Lines of the services while the trial ran, and a line for each step that was run.
    times: Time of each line, in seconds since the first step; empty if unknown.
    harmless: True if no member may be declared lost because of the trial.
    """

    trial: str
    outcome: Outcome
    lines: tuple[str, ...]
    times: tuple[float, ...] = ()
    harmless: bool = False

    @property
    def alarmed(self) -> bool:
        """Return whether a member was declared lost although it was only stopped for a moment."""
        return self.harmless and self._first("member lost") is not None

    @property
    def late(self) -> bool:
        """Return whether the answer was written before anything broke: a client may read long after the
        master wrote. False if no step was run.

        True also if the answer was finished before a member was declared lost, or if the first step ran but
        no line says that the answer was finished.
        """
        first_step = self._first(STEP_PREFIX)
        lost_member = self._first("member lost")
        finished = self._first(ANSWER_FINISHED)
        return first_step is not None and (finished is None or finished < max(first_step, lost_member or 0))

    def _first(self, pattern: str) -> int | None:
        """Return the number of the first line with a pattern; None if there is none.

        pattern: Regular expression.
        """
        return next((number for number, line in enumerate(self.lines) if re.search(pattern, line)), None)


@dataclass(slots=True)
class ServiceLog:
    """All lines that the services write, in order. A line is "service | words".

    lines: The lines.
    times: Time of each line by the monotonic clock, in seconds.
    """

    lines: list[str] = field(default_factory=list[str])
    times: list[float] = field(default_factory=list[float])
    _line_recorded: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self, process: Process, name: str | None = None) -> None:
        """Record a process's lines until it ends.

        Every waiting `wait_for` then looks at the lines again.

        process: The process; its output is a pipe.
        name: Name that is put before each line; None: the lines have a name already.
        """
        async for line in lines_of(process):
            async with self._line_recorded:
                self.record(f"{name} | {line}" if name else line)
                self._line_recorded.notify_all()

    def record(self, line: str) -> None:
        """Record a line with the present time.

        line: The line, without its end.
        """
        self.lines.append(line)
        self.times.append(time.monotonic())

    async def wait_for(self, pattern: str, num_earlier: int) -> str:
        """Return the first line that has a pattern; wait for such a line, without limit.

        Lines that were recorded after the first `num_earlier` lines count even if they precede this call.

        pattern: Regular expression.
        num_earlier: Number of earlier lines, which do not count.
        """
        async with self._line_recorded:
            while True:
                matching = [line for line in self.lines[num_earlier:] if re.search(pattern, line)]
                if matching:
                    return matching[0]
                await self._line_recorded.wait()


async def run(
    trials: Iterable[Trial],
    specsot: Sequence[str],
    service_log: ServiceLog,
    members: int,
    stages: int | None = None,
    request_arguments: Sequence[str] = DEFAULT_REQUEST,
) -> bool:
    """Run all trials, print them, and return whether all answers are the same.

    Returns False at once if the undisturbed answer, the first one, could not be had. Each trial starts once
    the fleet is complete; TimeoutError is raised if that takes more than LIMIT seconds. Besides the answer's
    text, the result requires that no answer was late and no member was declared lost for nothing.

    trials: The trials, which run after one without steps.
    specsot: Words of the `specsot` command, as a client runs it.
    service_log: Lines of the services.
    members: Number of members that have joined when the ring is complete.
    stages: Number of members that have layers; None: any number.
    request_arguments: Arguments of `specsot infer`, the question included.
    """
    reports: list[Report] = []
    for trial in (Trial("nothing"), *trials):
        await asyncio.wait_for(wait_complete(specsot, members, stages), LIMIT)
        reports.append(await run_trial(trial, specsot, service_log, request_arguments))
        print("\n".join(("", *trial_lines(reports[0], reports[-1]))), flush=True)
        if reports[0].outcome.text is None:
            return False
    print("\n".join(("", *table(reports))), flush=True)
    return all(same_answer(reports[0], report) for report in reports)


async def wait_complete(specsot: Sequence[str], members: int, stages: int | None = None) -> None:
    """Wait until the fleet is complete, by asking its master again and again, without limit.

    A query that fails, because the master does not answer for example, is repeated.

    specsot: Words of the `specsot` command, as a client runs it.
    members: Number of members that have joined when the ring is complete.
    stages: Number of members that have layers; None: any number.
    """
    while True:
        query = await asyncio.create_subprocess_exec(
            *specsot, "info", "--master", MASTER, "--json", stdout=PIPE, stderr=DEVNULL
        )
        output, _ = await query.communicate()
        if query.returncode == 0 and is_complete(json.loads(output), members, stages):
            return


def is_complete(info: dict[str, Any], members: int, stages: int | None) -> bool:
    """Return whether all members have joined, and as many of them as there are stages have layers.

    The result is False too while the fleet says that it waits for something ("waiting_for" is not empty).
    Drafters with layers do not count as stages.

    info: State of the fleet as `specsot info --json` prints it.
    members: Number of members that must have joined.
    stages: Number of workers that must have layers; None: any number.
    """
    workers = [
        member for member in info["members"] if member["layers"] is not None and member["kind"] == "worker"
    ]
    has_all_stages = stages is None or len(workers) == stages
    return len(info["members"]) == members and has_all_stages and not info["waiting_for"]


async def run_trial(
    trial: Trial,
    specsot: Sequence[str],
    service_log: ServiceLog,
    request_arguments: Sequence[str] = DEFAULT_REQUEST,
) -> Report:
    """Ask the question, run the trial's steps while the answer is written, and return the report.

    The report has only the lines recorded since the call. Times count from the first step, from the first
    line if no step ran.

    trial: The trial.
    specsot: Words of the `specsot` command, as a client runs it.
    service_log: Lines of the services.
    request_arguments: Arguments of `specsot infer`, the question included.
    Raises TimeoutError if the master's last line, or the end of the steps, does not come within LIMIT
        seconds.
    """
    num_earlier = len(service_log.lines)
    writing = asyncio.Event()
    steps = asyncio.create_task(run_steps(trial, writing, service_log, num_earlier))
    outcome = await ask(specsot, writing, request_arguments)
    if outcome.text is None:
        # Without an answer the remaining steps run all the same, since they repair what was broken.
        writing.set()
    else:
        await asyncio.wait_for(service_log.wait_for(ANSWER_FINISHED, num_earlier), LIMIT)
    await asyncio.wait_for(steps, LIMIT)
    lines = tuple(service_log.lines[num_earlier:])
    times = service_log.times[num_earlier:]
    step_times = [seconds for line, seconds in zip(lines, times) if line.startswith(STEP_PREFIX)]
    first_step = next(iter(step_times or times), 0.0)
    return Report(
        trial.name, outcome, lines, tuple(seconds - first_step for seconds in times), trial.harmless
    )


async def run_steps(trial: Trial, writing: asyncio.Event, service_log: ServiceLog, num_earlier: int) -> None:
    """Run the trial's steps, each after the line that it waits for.

    An exception of an act is passed on, and the steps after it do not run. The wait for a line has no limit
    of its own.

    trial: The trial.
    writing: Event that is set once an answer is being written; the first step waits for it.
    service_log: Lines of the services, to which a line for each step is added.
    num_earlier: Number of earlier lines, which do not count.
    """
    await writing.wait()
    for step in trial.steps:
        if step.after is not None:
            await service_log.wait_for(step.after, num_earlier)
        service_log.record(f"{STEP_PREFIX}{step.name}")
        await step.act()


async def ask(specsot: Sequence[str], writing: asyncio.Event, request_arguments: Sequence[str]) -> Outcome:
    """Return how the answer to the question ended, asked by a client of its own.

    If there is no answer within LIMIT seconds, the client is killed, and the outcome has no text and says
    so. With fewer than FIRST_STEP_EVENTS lines, `writing` is never set. Seconds count from the client's
    first line to its end.

    Raises ValueError if the client wrote no line at all, since there are then no two times to compare.

    specsot: Words of the `specsot` command, as a client runs it.
    writing: Event that is set after FIRST_STEP_EVENTS events of the answer.
    request_arguments: Arguments of `specsot infer`, the question included.
    """
    client = await asyncio.create_subprocess_exec(
        *specsot,
        "infer",
        "--master",
        MASTER,
        "--json",
        *request_arguments,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        limit=1 << 24,
    )
    times = list[float]()
    last_line = ""
    try:
        async with asyncio.timeout(LIMIT):
            async for line in lines_of(client):
                last_line = line
                times.append(time.monotonic())
                if len(times) == FIRST_STEP_EVENTS:
                    writing.set()
    except TimeoutError:
        client.kill()
        last_line = f"no answer within {LIMIT:g} s"
    await client.wait()
    times.append(time.monotonic())
    silences = [later - earlier for earlier, later in pairwise(times)]
    return outcome_of(last_line, times[-1] - times[0], max(silences))


async def lines_of(process: Process) -> AsyncIterator[str]:
    """Yield a process's lines without colours, until it ends.

    process: The process; its output is a pipe.
    """
    assert process.stdout is not None
    async for raw in process.stdout:
        yield COLOURS.sub("", raw.decode(errors="replace")).rstrip()


def outcome_of(last_line: str, seconds: float, silence: float) -> Outcome:
    """Return the outcome that the last line of a client reports.

    A line that is no JSON becomes the error ("no output" if it is empty). JSON whose event is not "finished"
    gives the error "the answer ended with ...". Only a "finished" event gives a text.

    last_line: Last line that the client wrote; empty if it wrote none.
    seconds: Seconds from the first event to the end.
    silence: Longest time between two events, in seconds.
    """
    try:
        event = json.loads(last_line)
    except ValueError:
        return Outcome(None, seconds, silence, last_line.strip() or "no output")
    if event.get("event") != "finished":
        return Outcome(None, seconds, silence, f"the answer ended with {event.get('event')}")
    return Outcome(event["text"], seconds, silence)


def same_answer(first: Report, report: Report) -> bool:
    """Return whether the trial's answer is the undisturbed one, although something broke while it was
    written. False if there was no answer, if the answer was written before anything broke, or if a member was
    declared lost for nothing.

    first: Report of the undisturbed answer.
    report: Report of the trial.
    """
    return (
        report.outcome.text is not None
        and report.outcome.text == first.outcome.text
        and not (report.late or report.alarmed)
    )


def result_in_words(first: Report, report: Report) -> str:
    """Return in words what became of the trial: the error, that it came too late, that a member was declared
    lost for nothing, or whether the answer is the undisturbed one.

    The error takes precedence over lateness, and lateness over a member that was declared lost for nothing.
    The result is "identical" or "**another one**" in the other cases.

    first: Report of the undisturbed answer.
    report: Report of the trial.
    """
    if report.outcome.error:
        return report.outcome.error
    if report.late:
        return "too late: the answer was complete already"
    if report.alarmed:
        return "**a member was declared lost for nothing**"
    return "identical" if same_answer(first, report) else "**another one**"


def without_repeats(report: Report) -> list[str]:
    """Return the lines of a report without repeated ones, each with its seconds since the first step.

    Times of day (hh:mm:ss) are removed before lines are compared. Of equal lines the first stays. If the
    report has no times, the lines are returned without seconds.

    report: Report of the trial.
    """
    words = [re.sub(r"\d\d:\d\d:\d\d ", "", line) for line in report.lines]
    times = [f"{seconds:7.2f} " for seconds in report.times] or [""] * len(words)
    return [f"{times[number]}{line}" for number, line in enumerate(words) if line not in words[:number]]


def trial_lines(first: Report, report: Report) -> list[str]:
    """Return the lines about one trial: how it ended, and what each service wrote.

    The first line has the trial's name, its result, the seconds and the longest silence; the services' lines
    follow without repeats.

    first: Report of the undisturbed answer.
    report: Report of the trial.
    """
    outcome = report.outcome
    ended = result_in_words(first, report)
    head = f"== {report.trial}: {ended}, {outcome.seconds:.1f} s, longest silence {outcome.silence:.1f} s"
    return [head, *(f"   {line}" for line in without_repeats(report))]


def table(reports: Sequence[Report]) -> list[str]:
    """Return a table of all trials, in Markdown.

    Each trial has one row: its name, its result in words, seconds, and the longest silence in seconds.

    reports: Reports of all trials, the undisturbed one first.
    """
    rows = [
        "| what happened while an answer was written | answer | seconds | longest silence |",
        "|---|---|---|---|",
    ]
    for report in reports:
        times = f"{report.outcome.seconds:.1f} | {report.outcome.silence:.1f}"
        rows.append(f"| {report.trial} | {result_in_words(reports[0], report)} | {times} |")
    return rows
