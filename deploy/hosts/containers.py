"""A worker's container is stopped, frozen, cut off, killed while an answer is written: what becomes of it.
With more workers than the ring needs one takes another's place, and all of them share the layers anew.

`docker/faults.sh` brings an engine, images and the services.
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
MORE = 4  # workers, two of which stand by


def docker(*words: str) -> Act:
    """Return an act that runs docker with these words."""
    return command("docker", *words)


def command(*words: str) -> Act:
    """Return an act that runs a command and waits for it. Raises CalledProcessError if it fails."""

    async def act() -> None:
        """Run the command on another thread."""
        await asyncio.to_thread(subprocess.run, words, check=True, stdout=subprocess.DEVNULL)

    return act


def crash() -> Act:
    """Return an act that ends the victim's process from outside, as a fault would: compose starts it again,
    unlike after `docker kill`.
    """

    async def act() -> None:
        """Find the process id, and kill it."""
        look = ["docker", "inspect", "--format", "{{.State.Pid}}", VICTIM]
        number = (await asyncio.to_thread(subprocess.check_output, look, text=True)).strip()
        await asyncio.to_thread(subprocess.run, ["kill", "-9", number], check=True)

    return act


def trials() -> list[Trial]:
    """Return the trials with as many workers as the ring needs."""
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


def scaled(client: list[str]) -> list[Trial]:
    """Return the trials with MORE workers.

    client: The `specsot` command, as it reaches the master.
    """
    again = Step("docker start", docker("start", VICTIM), r"master.*ring complete")
    anew = Step("specsot rebalance", command(*client, "rebalance"))
    return [
        Trial("docker kill, another worker stands by", (Step("docker kill", docker("kill", VICTIM)), again)),
        Trial(f"specsot rebalance, {MORE} workers", (anew,)),
    ]


def broken(how: tuple[str, ...], healed: tuple[str, ...]) -> tuple[Step, ...]:
    """Return the steps that break the victim, and heal it once the master has missed it.

    how, healed: Words of docker, without the container's name.
    """
    first = Step(" ".join(("docker", *how)), docker(*how, VICTIM))
    return first, Step(" ".join(("docker", *healed)), docker(*healed, VICTIM), LOST)


async def main(client: list[str]) -> int:
    """Run all trials; return 0 if all answers were the same, else 1.

    client: The `specsot` command, as it reaches the master.
    """
    voices = Voices()
    follow = ["docker-compose", "logs", "--follow", "--no-color", "--tail", "0"]
    logs = await asyncio.create_subprocess_exec(*follow, stdout=PIPE, stderr=STDOUT)
    listening = asyncio.create_task(voices.listen(logs))
    try:
        alike = await run(trials(), client, voices, MEMBERS)
        await command("docker-compose", "up", "-d", "--no-recreate", "--scale", f"worker={MORE}")()
        return 0 if await run(scaled(client), client, voices, MORE + 1) and alike else 1
    finally:
        logs.terminate()
        await listening


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
