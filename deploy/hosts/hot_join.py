"""A faster machine without files joins while an answer is written: how long the answer stops, and its pace.

The slower machine is simulated: the first worker says that it is on another one, and sleeps before frames.
With --rebalance both do, so that the second one stands by, until `specsot rebalance`. Needs `make install`:
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
    """times: Of each event that brought text, by the monotonic clock;
    tokens: That each brought.
    """

    text: str
    times: tuple[float, ...]
    tokens: tuple[int, ...]

    def pace(self, since: float, until: float) -> float:
        """Return the tokens a second between two moments; not a number for fewer than two events."""
        within = [(at, count) for at, count in zip(self.times, self.tokens) if since <= at <= until]
        took = within[-1][0] - within[0][0] if within else 0.0
        return sum(count for _, count in within[1:]) / took if took else math.nan

    def until(self, moment: float) -> int:
        """Return the number of tokens that came by this moment."""
        return sum(count for at, count in zip(self.times, self.tokens) if at <= moment)

    def next(self, moment: float) -> float:
        """Return when the first text after this moment came. Raises StopIteration if none came."""
        return next(at for at in self.times if at > moment)

    def longest_gap(self, since: float, until: float) -> float:
        """Return the longest time without text, in seconds; a gap counts if it begins within [since, until];
        0 without gaps.
        """
        gaps = (late - soon for soon, late in pairwise(self.times) if since <= soon <= until)
        return max(gaps, default=0.0)


async def ask(given: argparse.Namespace, begun: asyncio.Event) -> Answer:
    """Return the answer that a client of its own gets; `begun` is set after --before events."""
    words = ("--mode", "direct", "--ignore-eos", "--seed", "1", "--max-new-tokens", str(given.tokens))
    asked = await asyncio.create_subprocess_exec(
        *(str(BIN / "specsot"), "infer", "--master", MASTER, "--json", *words, QUESTION),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    times, tokens, event = list[float](), list[int](), dict[str, Any]()
    async for line in lines_of(asked):
        event = json.loads(line)
        if event["event"] == "merged_text":
            times.append(time.monotonic())
            tokens.append(event["step_tokens"])
        if len(times) == given.before:
            begun.set()
    await asked.wait()
    if event.get("event") != "finished":
        raise SystemExit(f"no answer: {event}")
    return Answer(event["text"], tuple(times), tuple(tokens))


async def worker(hosts: Hosts, given: argparse.Namespace, name: str, *command: str) -> None:
    """Start a worker or drafter.

    name: Name of the member.
    command: Its program with the first arguments.
    """
    held = ("--quantization", given.quantization) if given.quantization else ("--dtype", "fp32")
    place = ("--name", name, "--listen", "127.0.0.1:0", "--master", MASTER, "--kv-memory", "256M")
    await hosts.start(name, "", *command, *place, *held)


async def measure(hosts: Hosts, given: argparse.Namespace, cache: str) -> bool:
    """Let a second machine join while an answer is written, print how it went, and return whether both
    answers are the same.

    hosts: Starts the processes.
    given: The options.
    cache: Folder in which the second machine keeps layers.
    """
    shared, voices = ("--model", given.model), hosts.voices
    leader = (str(BIN / "specsot-master"), *shared, "--listen", MASTER)
    await hosts.start("master", "", *leader, *(() if given.head else ("--drafter", "none")))
    if given.head:
        head = (str(BIN / "specsot-drafter"), *shared, "--draft-model", given.head)
        await worker(hosts, given, "drafter", *head)
    slow = ("env", f"SLOW_FRAME={given.slower}", sys.executable, "-m", "tests.process.slow_worker", *shared)
    await worker(hosts, given, "slow", *slow)
    whole = "ring complete.*drafter=" if given.head else "ring complete"
    await asyncio.wait_for(voices.until(whole, 0), LIMIT)
    begun, since, asked = asyncio.Event(), len(voices.lines), 0.0
    answer = asyncio.create_task(ask(given, begun))
    await begun.wait()
    started = time.monotonic()
    quick = slow if given.rebalance else ("env", f"XDG_CACHE_HOME={cache}", str(BIN / "specsot-worker"))
    await worker(hosts, given, "quick", *quick)
    if given.rebalance:
        await asyncio.wait_for(voices.until("quick .*stands by", since), LIMIT)
        asked = time.monotonic()
        again = await asyncio.create_subprocess_exec(str(BIN / "specsot"), "rebalance", "--master", MASTER)
        await again.wait()
    interrupted = await answer
    joined, complete = (
        moment(hosts, pattern, since, interrupted.times[-1])
        for pattern in ("master .*member joined", "master .*ring complete")
    )
    ahead = r"quick .*loaded ahead +layers=\d"
    loaded = asked if given.rebalance else moment(hosts, ahead, since, interrupted.times[-1])
    undisturbed = await ask(given, asyncio.Event())
    end, first = interrupted.times[-1], interrupted.times[0]
    same = interrupted.text == undisturbed.text
    told = ("plan", "fetched", "KV rows", "loaded ahead")
    print(*(line for line in voices.lines if any(word in line for word in told)), sep="\n")
    print(f"text: {'identical' if same else '**another one**'}")
    print(f"tokens when it took over: {interrupted.until(loaded)} of {given.tokens}")
    print(f"started {started - first:.1f} s into the answer, joined {joined - started:.1f} s later,")
    print(f"all layers loaded {loaded - joined:.1f} s later, in the ring {complete - loaded:.2f} s later")
    last = max(at for at in interrupted.times if at <= loaded)
    pause, reading = interrupted.longest_gap(last, end), interrupted.next(complete) - complete
    print(f"pause: {pause:.2f} s, of it {reading:.2f} s for reading the text again")
    print(f"longest gap while it loaded: {interrupted.longest_gap(joined, last - 1e-6):.2f} s")
    before, after = interrupted.pace(first, started), interrupted.pace(complete, end)
    calm = undisturbed.pace(undisturbed.times[0], undisturbed.times[-1])
    print(f"tokens/s: {before:.1f} before, {after:.1f} after ({after / before:.1f}x); undisturbed {calm:.1f}")
    return same


def moment(hosts: Hosts, pattern: str, since: int, until: float) -> float:
    """Return when a service first wrote a line with this pattern.

    since: Number of earlier lines.
    until: Time at which the answer ended.

    Ends this script if no such line came before that.
    """
    lines = zip(hosts.voices.lines[since:], hosts.voices.times[since:])
    found = next((at for line, at in lines if re.search(pattern, line)), math.inf)
    if found > until:
        raise SystemExit(f"no {pattern!r} before the answer ended: not clearly faster, or too few --tokens")
    return found


async def main(given: argparse.Namespace) -> int:
    """Measure --times times; return 0 if all answers were the same, else 1."""
    return max([await once(given) for _ in range(given.times)])


async def once(given: argparse.Namespace) -> int:
    """Measure once with processes of its own; return 0 if both answers are the same, else 1."""
    hosts = Hosts()
    try:
        with tempfile.TemporaryDirectory() as cache:
            return 0 if await measure(hosts, given, cache) else 1
    except BaseException:
        print(*hosts.voices.lines, sep="\n")
        raise
    finally:
        await hosts.end()


def read() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo/base")
    parser.add_argument("--head", help="of a drafter; otherwise nobody drafts")
    parser.add_argument("--rebalance", action="store_true")
    parser.add_argument("--quantization", help="of both; otherwise they compute in fp32")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--before", type=int, default=40, help="events until the second machine is started")
    parser.add_argument("--slower", type=float, default=0.05, help="seconds for each frame")
    parser.add_argument("--times", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read())))
