"""Runs a fleet of processes on this machine; kills, freezes or stalls one of them while an answer is written.

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
from trials import ANSWER_FINISHED, LIMIT, MASTER, QUESTION, Step, Trial, run

# Number of stages of the ring.
STAGES = 2
# Seconds. Time that any member may be stopped without being declared lost. Untuned.
STALL = 1.0
# Returns the name of a member at the moment at which a trial needs it.
MemberName = Callable[[], str]


def trials(hosts: Hosts, standby: bool) -> list[Trial]:
    """Return the trials of each member; a member that is gone comes back once the answer is written, so that
    nothing waits for it.

    With a standby worker, only the two stages are broken, and nothing is stalled. Without, the drafter is
    broken too, and stages, drafter and master are each stalled for STALL seconds, which must not declare
    anyone lost.

    hosts: The running processes.
    standby: True if a further worker is registered.
    """
    addition = ", another one stands by" if standby else ""
    parts: list[tuple[str, MemberName]] = [
        ("the first stage", worker_of_stage(hosts, 0)),
        ("the last stage", worker_of_stage(hosts, -1)),
    ]
    if not standby:
        parts.append(("the drafter", lambda: "drafter"))
    breaking = [
        trial
        for words, member_name in parts
        for trial in (
            Trial(f"{words} is killed{addition}", breaking_steps(hosts, member_name, signal.SIGKILL)),
            Trial(f"{words} is frozen{addition}", breaking_steps(hosts, member_name, signal.SIGSTOP)),
        )
    ]
    if standby:
        return breaking
    parts.append(("the master", lambda: "master"))
    stalling = [
        Trial(f"{words} stands still for {STALL:g} s", stall_steps(hosts, member_name), harmless=True)
        for words, member_name in parts
    ]
    return [*breaking, *stalling]


def worker_of_stage(hosts: Hosts, stage: int) -> MemberName:
    """Return a function that returns the name of the worker that runs a stage now, by the master's newest
    line.

    The returned function raises StopIteration if no ring was complete yet.

    hosts: The running processes, with the master's lines.
    stage: Number of the stage; -1: the last one.
    """

    def newest_name() -> str:
        """Return the worker's name."""
        line = next(line for line in reversed(hosts.service_log.lines) if "ring complete" in line)
        stages = re.search(r"stages='?([^']*)'?", line)
        assert stages is not None
        return stages[1].split()[stage].partition("=")[0]

    return newest_name


def breaking_steps(hosts: Hosts, member_name: MemberName, signal_sent: signal.Signals) -> tuple[Step, ...]:
    """Return the two steps that kill a member and start it again, or freeze it until the answer is written.

    The name is looked up when the first step runs, and kept for the second one.

    hosts: The running processes.
    member_name: Returns the name of the member.
    signal_sent: Signal that breaks the member, SIGKILL or SIGSTOP.
    """
    victims: list[str] = []

    async def harm() -> None:
        """Find the member, and send it the signal."""
        victims.append(member_name())
        await hosts.send_signal(victims[0], signal_sent)

    async def heal() -> None:
        """Start the member again, or let it continue."""
        if signal_sent is signal.SIGKILL:
            await hosts.restart(victims[0])
        else:
            await hosts.send_signal(victims[0], signal.SIGCONT)

    return Step(signal_sent.name, harm), Step("healed", heal, ANSWER_FINISHED)


def stall_steps(hosts: Hosts, member_name: MemberName) -> tuple[Step, ...]:
    """Return the step that freezes a member for STALL seconds.

    The member's name is looked up when the step runs.

    hosts: The running processes.
    member_name: Returns the name of the member.
    """

    async def stand_still() -> None:
        """Freeze the member, wait, and let it continue."""
        name = member_name()
        await hosts.send_signal(name, signal.SIGSTOP)
        await asyncio.sleep(STALL)
        await hosts.send_signal(name, signal.SIGCONT)

    return (Step(f"SIGSTOP for {STALL:g} s", stand_still),)


async def serve(hosts: Hosts, options: argparse.Namespace) -> None:
    """Start master, workers and drafter, and wait until the ring is complete.

    Without --head, no drafter is started. Raises TimeoutError after LIMIT seconds.

    hosts: Starts the processes, and records their lines.
    options: The options of this script.
    """
    master = ("--listen", MASTER, "--workers", str(STAGES))
    await start(hosts, "master", options, *master, "--drafter", "eagle" if options.head else "none")
    for number in range(STAGES):
        await member(hosts, f"worker-{number}", options)
    if options.head:
        await member(hosts, "drafter", options, "--draft-model", options.head)
    await asyncio.wait_for(hosts.service_log.wait_for("ring complete", 0), LIMIT)


async def member(hosts: Hosts, name: str, options: argparse.Namespace, *arguments: str) -> None:
    """Start a worker or the drafter.

    hosts: Starts the process.
    name: Name of the member.
    options: The options of this script.
    arguments: Further arguments of the service.
    """
    address_flags = ("--name", name, "--listen", "127.0.0.1:0", "--master", MASTER)
    await start(hosts, name, options, *address_flags, "--kv-memory", "256M", "--dtype", "fp32", *arguments)


async def start(hosts: Hosts, name: str, options: argparse.Namespace, *words: str) -> None:
    """Start a service by the same interpreter; each process computes with one thread, as there are fewer
    cores than members.

    The program is specsot-master, specsot-worker or specsot-drafter, by the name; "spare" is a worker.

    hosts: Starts the process.
    name: Name of the member.
    options: The options of this script.
    words: Arguments of the service.
    """
    kind = "worker" if name == "spare" else name.partition("-")[0]
    command = ("env", "OMP_NUM_THREADS=1", str(BIN / f"specsot-{kind}"), "--model", options.model, *words)
    await hosts.start(name, "", *command)


async def main(options: argparse.Namespace) -> int:
    """Run all trials that were chosen; return 0 if all answers were the same, else 1.

    First come the trials without a standby worker, then a further worker is started and its trials run.
    --only leaves out trials whose name lacks these words; a group without trials is skipped. All processes
    are ended before the call returns or raises.

    options: The options of this script.
    """
    request_arguments = ("--mode", options.mode, "--max-new-tokens", str(options.tokens), QUESTION)
    client = [str(BIN / "specsot")]
    members = STAGES + bool(options.head)
    all_same = True
    async with Hosts() as hosts:
        await serve(hosts, options)
        for standby in (False, True):
            if standby:
                await member(hosts, "spare", options)
            chosen = [trial for trial in trials(hosts, standby) if options.only in trial.name]
            if chosen:
                all_same &= await run(
                    chosen, client, hosts.service_log, members + standby, STAGES, request_arguments
                )
    return 0 if all_same else 1


def read() -> argparse.Namespace:
    """Return the parsed command line.

    The options name the model, the head (empty: nothing is drafted), the mode, the number of tokens, and a
    part of the trials' names. Exits with status 2 for an unknown option.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/demo/base")
    parser.add_argument("--head", default="models/demo/eagle3", help="empty: nothing is drafted")
    parser.add_argument("--mode", default="direct")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--only", default="", help="trials that have these words in their names")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(read())))
