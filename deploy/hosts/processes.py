"""A fleet of processes of this machine; one of them is killed, frozen, or stalled while it answers.

Needs `make install`:
    python deploy/hosts/processes.py [--model DIR] [--head DIR] [--only WORDS] [--mode direct]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from collections.abc import Callable

from hosts import BIN, Hosts
from trials import LIMIT, MASTER, QUESTION, WRITTEN, Step, Trial, run

STAGES = 2
STALL = 1.0  # seconds for which any member may stand still without being missed


Who = Callable[[], str]  # the name of a member, once a trial needs it


def trials(hosts: Hosts, standby: bool) -> list[Trial]:
    """Return the trials of each member; a member that is gone comes back once the answer is written, so that
    nothing waits for it.

    standby: A further worker is registered.
    """
    beside = ", another one stands by" if standby else ""
    parts: list[tuple[str, Who]] = [
        ("the first stage", running(hosts, 0)),
        ("the last stage", running(hosts, -1)),
    ]
    if not standby:
        parts.append(("the drafter", lambda: "drafter"))
    harm = [
        trial
        for words, who in parts
        for trial in (
            Trial(f"{words} is killed{beside}", broken(hosts, who, signal.SIGKILL)),
            Trial(f"{words} is frozen{beside}", broken(hosts, who, signal.SIGSTOP)),
        )
    ]
    if standby:
        return harm
    parts.append(("the master", lambda: "master"))
    still = [
        Trial(f"{words} stands still for {STALL:g} s", stalled(hosts, who), harmless=True)
        for words, who in parts
    ]
    return [*harm, *still]


def running(hosts: Hosts, stage: int) -> Who:
    """Return a function that returns the name of the worker that runs a stage now, by the master's newest
    line.

    stage: Its number; -1: the last one.
    """

    def look() -> str:
        """Return the worker's name."""
        said = next(line for line in reversed(hosts.voices.lines) if "ring complete" in line)
        stages = re.search(r"stages='?([^']*)'?", said)
        assert stages is not None
        return stages[1].split()[stage].partition("=")[0]

    return look


def broken(hosts: Hosts, who: Who, how: signal.Signals) -> tuple[Step, ...]:
    """Return the steps that kill a member and start it again, or freeze it until the answer is written.

    who: Returns its name.
    how: SIGKILL or SIGSTOP.
    """
    victims: list[str] = []

    async def harm() -> None:
        """Find the member, and send it the signal."""
        victims.append(who())
        await hosts.tell(victims[0], how)()

    async def heal() -> None:
        """Start the member again, or let it continue."""
        name = victims[0]
        await (hosts.again(name) if how is signal.SIGKILL else hosts.tell(name, signal.SIGCONT))()

    return Step(how.name, harm), Step("healed", heal, WRITTEN)


def stalled(hosts: Hosts, who: Who) -> tuple[Step, ...]:
    """Return the step that freezes a member for STALL seconds.

    who: Returns its name.
    """

    async def stand_still() -> None:
        """Freeze the member, wait, and let it continue."""
        name = who()
        await hosts.tell(name, signal.SIGSTOP)()
        await asyncio.sleep(STALL)
        await hosts.tell(name, signal.SIGCONT)()

    return (Step(f"SIGSTOP for {STALL:g} s", stand_still),)


async def serve(hosts: Hosts, given: argparse.Namespace) -> None:
    """Start master, workers and drafter, and wait until the ring is complete.

    given: The options.
    """
    master = ("--listen", MASTER, "--workers", str(STAGES))
    await start(hosts, "master", given, *master, "--drafter", "eagle" if given.head else "none")
    for number in range(STAGES):
        await member(hosts, f"worker-{number}", given)
    if given.head:
        await member(hosts, "drafter", given, "--draft-model", given.head)
    await asyncio.wait_for(hosts.voices.until("ring complete", 0), LIMIT)


async def member(hosts: Hosts, name: str, given: argparse.Namespace, *more: str) -> None:
    """Start a worker or the drafter.

    name: Name of the member.
    more: Further arguments.
    """
    place = ("--name", name, "--listen", "127.0.0.1:0", "--master", MASTER)
    await start(hosts, name, given, *place, "--kv-memory", "256M", "--dtype", "fp32", *more)


async def start(hosts: Hosts, name: str, given: argparse.Namespace, *words: str) -> None:
    """Start a service by the same interpreter; each process computes with one thread, as there are fewer
    cores than members.

    words: Its arguments.
    """
    kind = "worker" if name == "spare" else name.partition("-")[0]
    command = ("env", "OMP_NUM_THREADS=1", str(BIN / f"specsot-{kind}"), "--model", given.model, *words)
    await hosts.start(name, "", *command)


async def main(given: argparse.Namespace) -> int:
    """Run all trials that were chosen; return 0 if all answers were the same, else 1."""
    hosts, self = Hosts(), asyncio.current_task()
    assert self is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.cancel)
    asking = ("--mode", given.mode, "--max-new-tokens", str(given.tokens), QUESTION)
    client, members, well = [str(BIN / "specsot")], STAGES + bool(given.head), True
    try:
        await serve(hosts, given)
        for standby in (False, True):
            if standby:
                await member(hosts, "spare", given)
            wanted = [one for one in trials(hosts, standby) if given.only in one.name]
            if wanted:
                well &= await run(wanted, client, hosts.voices, members + standby, STAGES, asking)
        return 0 if well else 1
    finally:
        await hosts.end()


def read() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo/base")
    parser.add_argument("--head", default="models/demo/eagle3", help="empty: nobody drafts")
    parser.add_argument("--mode", default="direct")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--only", default="", help="trials that have these words in their names")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read())))
