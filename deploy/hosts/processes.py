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
    """Of each member; who is gone comes back once the answer is written, so that nothing waits for it."""
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
    """Whoever runs a stage now, by what the master said last."""

    def look() -> str:
        said = next(line for line in reversed(hosts.voices.lines) if "ring complete" in line)
        stages = re.search(r"stages='?([^']*)'?", said)
        assert stages is not None
        return stages[1].split()[stage].partition("=")[0]

    return look


def broken(hosts: Hosts, who: Who, how: signal.Signals) -> tuple[Step, ...]:
    """Killed and started again, or frozen until the answer is written."""
    victims: list[str] = []

    async def harm() -> None:
        victims.append(who())
        await hosts.tell(victims[0], how)()

    async def heal() -> None:
        name = victims[0]
        await (hosts.again(name) if how is signal.SIGKILL else hosts.tell(name, signal.SIGCONT))()

    return Step(how.name, harm), Step("healed", heal, WRITTEN)


def stalled(hosts: Hosts, who: Who) -> tuple[Step, ...]:
    async def stand_still() -> None:
        name = who()
        await hosts.tell(name, signal.SIGSTOP)()
        await asyncio.sleep(STALL)
        await hosts.tell(name, signal.SIGCONT)()

    return (Step(f"SIGSTOP for {STALL:g} s", stand_still),)


async def serve(hosts: Hosts, given: argparse.Namespace) -> None:
    master = ("--listen", MASTER, "--workers", str(STAGES))
    await start(hosts, "master", given, *master, "--drafter", "eagle" if given.head else "none")
    for number in range(STAGES):
        await member(hosts, f"worker-{number}", given)
    if given.head:
        await member(hosts, "drafter", given, "--draft-model", given.head)
    await asyncio.wait_for(hosts.voices.until("ring complete", 0), LIMIT)


async def member(hosts: Hosts, name: str, given: argparse.Namespace, *more: str) -> None:
    place = ("--name", name, "--listen", "127.0.0.1:0", "--master", MASTER)
    await start(hosts, name, given, *place, "--kv-memory", "256M", "--dtype", "fp32", *more)


async def start(hosts: Hosts, name: str, given: argparse.Namespace, *words: str) -> None:
    """By the same interpreter; each process has a core, as there are fewer than members."""
    kind = "worker" if name == "spare" else name.partition("-")[0]
    command = ("env", "OMP_NUM_THREADS=1", str(BIN / f"specsot-{kind}"), "--model", given.model, *words)
    await hosts.start(name, "", *command)


async def main(given: argparse.Namespace) -> int:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo/base")
    parser.add_argument("--head", default="models/demo/eagle3", help="empty: nobody drafts")
    parser.add_argument("--mode", default="direct")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--only", default="", help="trials that have these words in their names")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read())))
