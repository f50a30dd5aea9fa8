"""Lets a faster machine without model files join while an answer is written; prints pause and speed.

The slower machine is simulated: the first worker registers as one of another host, and sleeps before frames.
With --rebalance both workers sleep, so that the second one is a standby until `specsot rebalance`. Needs
`make install`:
    python deploy/hosts/hot_join.py [--model FILE] [--head DIRECTORY] [--quantization int8] [--tokens 900]
        [--before 40] [--times 5] [--rebalance]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hosts import BIN, Hosts
from trials import LIMIT, MASTER, QUESTION, lines_of


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as a client received it.

    text: The merged text.
    times: Time of each event that brought text, by the monotonic clock, in seconds.
    tokens: Number of tokens that each of these events brought.
    """

    text: str
    times: tuple[float, ...]
    tokens: tuple[int, ...]

    def pace(self, start: float, end: float) -> float:
        """Return the tokens a second between two moments; not a number for fewer than two events.

        The first event's tokens do not count, since the time before it is unknown. Events at the moments
        themselves count.

        start, end: Times of the monotonic clock, in seconds.
        """
        events = [(time, count) for time, count in zip(self.times, self.tokens) if start <= time <= end]
        seconds = events[-1][0] - events[0][0] if events else 0.0
        return sum(count for _, count in events[1:]) / seconds if seconds else math.nan

    def num_tokens_at(self, moment: float) -> int:
        """Return the number of tokens that had come by a moment.

        moment: Time of the monotonic clock, in seconds.
        """
        return sum(count for time, count in zip(self.times, self.tokens) if time <= moment)

    def next_time(self, moment: float) -> float:
        """Return when the first text after a moment came.

        moment: Time of the monotonic clock, in seconds.
        Raises StopIteration if no text came after it.
        """
        return next(time for time in self.times if time > moment)

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest time without text, in seconds; 0 without gaps.

        The gap's end may lie after `end`.

        start, end: Times of the monotonic clock. A gap counts if it begins within [start, end].
        """
        gaps = (late - soon for soon, late in pairwise(self.times) if start <= soon <= end)
        return max(gaps, default=0.0)


async def ask(options: argparse.Namespace, enough_events: asyncio.Event) -> Answer:
    """Return the answer that a client of its own receives. Raise SystemExit if there is no answer.

    With fewer events than --before, `enough_events` is never set. Only events of merged text count.

    options: The options of this script.
    enough_events: Event that is set once --before events with text have come.
    """
    words = ("--mode", "direct", "--ignore-eos", "--seed", "1", "--max-new-tokens", str(options.tokens))
    client = await asyncio.create_subprocess_exec(
        *(str(BIN / "specsot"), "infer", "--master", MASTER, "--json", *words, QUESTION),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    times = list[float]()
    tokens = list[int]()
    event = dict[str, Any]()
    async for line in lines_of(client):
        event = json.loads(line)
        if event["event"] == "merged_text":
            times.append(time.monotonic())
            tokens.append(event["step_tokens"])
        if len(times) == options.before:
            enough_events.set()
    await client.wait()
    if event.get("event") != "finished":
        raise SystemExit(f"no answer: {event}")
    return Answer(event["text"], tuple(times), tuple(tokens))


async def worker(hosts: Hosts, options: argparse.Namespace, name: str, *command: str) -> None:
    """Start a worker or drafter.

    Without --quantization, it computes in fp32.

    hosts: Starts the process.
    options: The options of this script.
    name: Name of the member.
    command: The member's program with its first arguments.
    """
    precision = ("--quantization", options.quantization) if options.quantization else ("--dtype", "fp32")
    address_flags = ("--name", name, "--listen", "127.0.0.1:0", "--master", MASTER, "--kv-memory", "256M")
    await hosts.start(name, "", *command, *address_flags, *precision)


async def measure(hosts: Hosts, options: argparse.Namespace, cache: str) -> bool:
    """Let a second machine join while an answer is written, print how it went, and return whether both
    answers are the same.

    Without --rebalance the second worker loads its layers from the first; with it, the second worker stands
    by until `specsot rebalance`. Raises TimeoutError if the ring is not complete within LIMIT seconds, and
    SystemExit if there is no answer, or the second machine was not in the ring before the answer ended.

    hosts: Starts the processes.
    options: The options of this script.
    cache: Folder in which the second machine keeps layers.
    """
    model_flags = ("--model", options.model)
    service_log = hosts.service_log
    leader = (str(BIN / "specsot-master"), *model_flags, "--listen", MASTER)
    await hosts.start("master", "", *leader, *(() if options.head else ("--drafter", "none")))
    if options.head:
        head = (str(BIN / "specsot-drafter"), *model_flags, "--draft-model", options.head)
        await worker(hosts, options, "drafter", *head)
    slow = (
        "env",
        f"SLOW_FRAME={options.slower}",
        sys.executable,
        "-m",
        "tests.process.slow_worker",
        *model_flags,
    )
    await worker(hosts, options, "slow", *slow)
    complete_pattern = "ring complete.*drafter=" if options.head else "ring complete"
    await asyncio.wait_for(service_log.wait_for(complete_pattern, 0), LIMIT)
    enough_events = asyncio.Event()
    num_earlier = len(service_log.lines)
    rebalance_time = 0.0
    answer = asyncio.create_task(ask(options, enough_events))
    await enough_events.wait()
    started = time.monotonic()
    quick = slow if options.rebalance else ("env", f"XDG_CACHE_HOME={cache}", str(BIN / "specsot-worker"))
    await worker(hosts, options, "quick", *quick)
    if options.rebalance:
        await asyncio.wait_for(service_log.wait_for("quick .*stands by", num_earlier), LIMIT)
        rebalance_time = time.monotonic()
        rebalance = await asyncio.create_subprocess_exec(
            str(BIN / "specsot"), "rebalance", "--master", MASTER
        )
        await rebalance.wait()
    interrupted = await answer
    joined, complete = (
        time_of_line(hosts, pattern, num_earlier, interrupted.times[-1])
        for pattern in ("master .*member joined", "master .*ring complete")
    )
    ahead = r"quick .*loaded ahead +layers=\d"
    loaded = (
        rebalance_time
        if options.rebalance
        else time_of_line(hosts, ahead, num_earlier, interrupted.times[-1])
    )
    undisturbed = await ask(options, asyncio.Event())
    first, end = interrupted.times[0], interrupted.times[-1]
    same = interrupted.text == undisturbed.text
    shown_words = ("plan", "fetched", "KV rows", "loaded ahead")
    print(*(line for line in service_log.lines if any(word in line for word in shown_words)), sep="\n")
    print(f"text: {'identical' if same else '**another one**'}")
    print(f"tokens when it took over: {interrupted.num_tokens_at(loaded)} of {options.tokens}")
    print(f"started {started - first:.1f} s into the answer, joined {joined - started:.1f} s later,")
    print(f"all layers loaded {loaded - joined:.1f} s later, in the ring {complete - loaded:.2f} s later")
    last = max(time for time in interrupted.times if time <= loaded)
    pause, reading = interrupted.longest_gap(last, end), interrupted.next_time(complete) - complete
    print(f"pause: {pause:.2f} s, of it {reading:.2f} s for reading the text again")
    print(f"longest gap while it loaded: {interrupted.longest_gap(joined, last - 1e-6):.2f} s")
    before, after = interrupted.pace(first, started), interrupted.pace(complete, end)
    undisturbed_pace = undisturbed.pace(undisturbed.times[0], undisturbed.times[-1])
    ratio = f"{before:.1f} before, {after:.1f} after ({after / before:.1f}x)"
    print(f"tokens/s: {ratio}; undisturbed {undisturbed_pace:.1f}")
    return same


def time_of_line(hosts: Hosts, pattern: str, num_earlier: int, end: float) -> float:
    """Return when a service first wrote a line with a pattern. Ends this script if no such line came before
    the answer ended.

    The time is that of the monotonic clock, in seconds.

    hosts: The running processes.
    pattern: Regular expression.
    num_earlier: Number of earlier lines, which do not count.
    end: Time at which the answer ended, by the monotonic clock.
    """
    lines = zip(hosts.service_log.lines[num_earlier:], hosts.service_log.times[num_earlier:])
    line_time = next((time for line, time in lines if re.search(pattern, line)), math.inf)
    if line_time > end:
        raise SystemExit(f"no {pattern!r} before the answer ended: not clearly faster, or too few --tokens")
    return line_time


async def main(options: argparse.Namespace) -> int:
    """Measure --times times; return 0 if all answers were the same, else 1.

    options: The options of this script.
    """
    return max([await once(options) for _ in range(options.times)])


async def once(options: argparse.Namespace) -> int:
    """Measure once with processes of its own; return 0 if both answers are the same, else 1.

    If something fails, the services' lines are printed on stderr. All processes are ended in every case.

    options: The options of this script.
    """
    with tempfile.TemporaryDirectory() as cache:
        async with Hosts() as hosts:
            return 0 if await measure(hosts, options, cache) else 1


def read() -> argparse.Namespace:
    """Return the parsed command line.

    The options are those in the module's docstring, and --slower: seconds for each frame of the slower
    machine. Exits with status 2 for an unknown option.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo/base")
    parser.add_argument("--head", help="of a drafter; without it nothing is drafted")
    parser.add_argument("--rebalance", action="store_true")
    parser.add_argument("--quantization", help="of both; otherwise they compute in fp32")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--before", type=int, default=40, help="events until the second machine is started")
    parser.add_argument("--slower", type=float, default=0.05, help="seconds for each frame")
    parser.add_argument("--times", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read())))
