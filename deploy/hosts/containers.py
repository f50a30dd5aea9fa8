"""A worker's container is stopped, frozen, cut off, killed while an answer is written: what becomes of it.

Refuses to know how containers came up: docker/faults.sh brings an engine, images and the services.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT

from trials import Act, Step, Trial, Voices, run

PROJECT = "specsot"
VICTIM = f"{PROJECT}_worker_1"
MEMBERS = 3  # two workers and the drafter
NETWORK = f"{PROJECT}_ring"
LOST = r"master.*member lost"


def docker(*words: str) -> Act:
    async def act() -> None:
        await asyncio.to_thread(subprocess.run, ["docker", *words], check=True, stdout=subprocess.DEVNULL)

    return act


def crash() -> Act:
    """End its process from outside, as a fault would: compose starts it again, unlike after `docker kill`."""

    async def act() -> None:
        look = ["docker", "inspect", "--format", "{{.State.Pid}}", VICTIM]
        number = (await asyncio.to_thread(subprocess.check_output, look, text=True)).strip()
        await asyncio.to_thread(subprocess.run, ["kill", "-9", number], check=True)

    return act


def trials() -> list[Trial]:
    return [
        Trial("docker stop, then start", broken(("stop",), ("start",))),
        Trial("its process is killed; compose starts it again", (Step("kill -9", crash()),)),
        Trial("docker kill, then start", broken(("kill",), ("start",))),
        Trial("docker pause until the master misses it", broken(("pause",), ("unpause",))),
        Trial(
            "docker network disconnect until the master misses it",
            broken(("network", "disconnect", NETWORK), ("network", "connect", NETWORK)),
        ),
    ]


def broken(how: tuple[str, ...], healed: tuple[str, ...]) -> tuple[Step, ...]:
    """One worker, until the master has missed it."""
    first = Step(" ".join(("docker", *how)), docker(*how, VICTIM))
    return first, Step(" ".join(("docker", *healed)), docker(*healed, VICTIM), LOST)


async def main(client: list[str]) -> int:
    """client: the `specsot` command, as it reaches the master."""
    voices = Voices()
    follow = ["docker-compose", "logs", "--follow", "--no-color", "--tail", "0"]
    logs = await asyncio.create_subprocess_exec(*follow, stdout=PIPE, stderr=STDOUT)
    listening = asyncio.create_task(voices.listen(logs))
    try:
        return 0 if await run(trials(), client, voices, MEMBERS) else 1
    finally:
        logs.terminate()
        await listening


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
