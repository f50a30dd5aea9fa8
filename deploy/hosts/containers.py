"""Stops, freezes, disconnects and kills a worker's container while an answer is written; checks the answer.

With more workers than the ring needs, a standby worker replaces the victim, and `specsot rebalance`
redistributes the layers. `docker/faults.sh` starts a container engine and the services, and runs this script.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from functools import partial

from trials import Act, ServiceLog, Step, Trial, run

# Compose's name of the project.
PROJECT = "specsot"
# Container that is broken.
VICTIM = f"{PROJECT}_worker_1"
MEMBERS = 3  # Two workers and the drafter.
# Network of the containers.
NETWORK = f"{PROJECT}_ring"
# Pattern of the master's line that says that a member was lost.
LOST = r"master.*member lost"
MORE_WORKERS = 4  # Workers, of which two are standby workers.


def docker(*words: str) -> Act:
    """Return an act that runs docker.

    words: Arguments of docker.
    """
    return partial(execute, "docker", *words)


async def execute(*words: str) -> None:
    """Run a command on another thread, and wait for it. Its output is dropped.

    Raises CalledProcessError if the command fails.

    words: The command and its arguments.
    """
    await asyncio.to_thread(subprocess.run, words, check=True, stdout=subprocess.DEVNULL)


async def crash() -> None:
    """End the victim's process from outside, as a fault would: compose starts it again, unlike after
    `docker kill`.

    Raises CalledProcessError if the container is not found or the process cannot be killed.
    """
    query = ["docker", "inspect", "--format", "{{.State.Pid}}", VICTIM]
    number = (await asyncio.to_thread(subprocess.check_output, query, text=True)).strip()
    await execute("kill", "-9", number)


def trials() -> list[Trial]:
    """Return the trials with as many workers as the ring needs."""
    return [
        Trial("docker stop, then start", breaking_steps(("stop",), ("start",))),
        Trial("its process is killed; compose starts it again", (Step("kill -9", crash),)),
        Trial("docker kill, then start", breaking_steps(("kill",), ("start",))),
        Trial("docker pause until the master misses it", breaking_steps(("pause",), ("unpause",))),
        Trial(
            "docker network disconnect until the master misses it",
            breaking_steps(("network", "disconnect", NETWORK), ("network", "connect", NETWORK)),
        ),
    ]


def scaled(client: list[str]) -> list[Trial]:
    """Return the trials with MORE_WORKERS workers.

    The victim is killed and started again once the ring is complete without it; then the layers are
    redistributed while an answer is written.

    client: Words of the `specsot` command, as it reaches the master.
    """
    restart = Step("docker start", docker("start", VICTIM), r"master.*ring complete")
    rebalance = Step("specsot rebalance", partial(execute, *client, "rebalance"))
    return [
        Trial(
            "docker kill, another worker stands by", (Step("docker kill", docker("kill", VICTIM)), restart)
        ),
        Trial(f"specsot rebalance, {MORE_WORKERS} workers", (rebalance,)),
    ]


def breaking_steps(breaking_words: tuple[str, ...], repairing_words: tuple[str, ...]) -> tuple[Step, ...]:
    """Return the two steps that break the victim, and repair it once the master has declared it lost.

    breaking_words: Words of docker that break it, without the container's name.
    repairing_words: Words of docker that repair it, without the container's name.
    """
    first = Step(" ".join(("docker", *breaking_words)), docker(*breaking_words, VICTIM))
    repair = Step(" ".join(("docker", *repairing_words)), docker(*repairing_words, VICTIM), LOST)
    return first, repair


async def main(client: list[str]) -> int:
    """Run all trials; return 0 if all answers were the same, else 1.

    The trials of `trials` run first, then further workers are started, and the trials of `scaled` run, even
    if an answer differed. The logs are read until the end.

    client: Words of the `specsot` command, as it reaches the master.
    """
    service_log = ServiceLog()
    follow = ["docker-compose", "logs", "--follow", "--no-color", "--tail", "0"]
    logs = await asyncio.create_subprocess_exec(*follow, stdout=PIPE, stderr=STDOUT)
    listening = asyncio.create_task(service_log.listen(logs))
    try:
        all_same = await run(trials(), client, service_log, MEMBERS)
        await execute("docker-compose", "up", "-d", "--no-recreate", "--scale", f"worker={MORE_WORKERS}")
        return 0 if await run(scaled(client), client, service_log, MORE_WORKERS + 1) and all_same else 1
    finally:
        logs.terminate()
        await listening


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
