"""A second machine joins by a code, over network namespaces: wrong codes, an old version, pulled cables.

Needs root, Linux, iproute2 and `make install`:
    python deploy/hosts/joining.py [--log FILE] [what `specsot serve` is given, such as --demo small]
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from dataclasses import dataclass
from pathlib import Path

from hosts import SWITCH, Hosts, cable, cut, ip, missed, network, on
from trials import LIMIT, Trial, run

SHARED = "10.77.0.1:50060"  # where members reach the first machine
JOINED = "10.77.0.2:50051"  # what a worker on b calls itself
OLD = (
    "import specsot._version as own; own.__version__ = '0.0.9'; "
    "from specsot_app.cli import main; raise SystemExit(main())"
)
SLOW = ("rate", "20mbit", "burst", "32kb", "latency", "300ms")  # of the line on which layers are fetched
Rows = list[tuple[str, str]]


@dataclass(slots=True)
class Machines:
    """The first machine on a; others join from b and c.

    homes: What each keeps; a alone has the model.
    """

    hosts: Hosts
    homes: Path

    def specsot(self, host: str, *words: str, code: str | None = None) -> list[str]:
        """Return the words that run `specsot` on a host.

        words: Its arguments.
        code: Python that runs instead of it.
        """
        command = ["specsot"] if code is None else ["python", "-c", code]
        own = [f"XDG_STATE_HOME={self.homes / host}", f"XDG_CACHE_HOME={self.homes / host}"]
        return ["env", *own[: 1 if host == "a" else 2], *command, *words]

    async def share(self, *words: str) -> None:
        """Start `specsot serve --share` on the first machine.

        words: Further arguments.
        """
        where = ("--fleet-listen", SHARED, "--dtype", "fp32", "--http-port", "8000")
        await self.hosts.start("serve", "a", *self.specsot("a", "serve", "--share", *where, *words))

    async def code(self, since: int = 0) -> str:
        """Return the newest code that the first machine printed.

        since: Number of earlier lines, which do not count.
        """
        return (await self.heard("^on the next machine: ", since)).split()[-1]

    async def heard(self, pattern: str, since: int = 0) -> str:
        """Return the first line with this pattern; wait for it at most LIMIT seconds.

        since: Number of earlier lines, which do not count.
        """
        return await asyncio.wait_for(self.hosts.voices.until(pattern, since), LIMIT)

    async def refused(self, host: str, written: str, code: str | None = None) -> str:
        """Return what a machine prints that may not join, and its exit status.

        written: The code to join.
        code: Python that runs instead of `specsot`.
        """
        words = [*on(host), *self.specsot(host, "join", written, code=code)]
        tried = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        told, _ = await asyncio.wait_for(tried.communicate(), LIMIT)
        return f"`{told.decode().strip().splitlines()[-1]}`, status {tried.returncode}"


def mistyped(code: str) -> str:
    """Return the code of the same fleet with another secret."""
    return code[:-4] + ("AAAA" if code[-4:] != "AAAA" else "BBBB")


def of_others(code: str) -> str:
    """Return the code of another fleet at the same address."""
    address, _, told = code.rpartition("/")
    return f"{address}/{'A' if told[0] != 'A' else 'B'}{told[1:]}"


async def refusals(machines: Machines) -> Rows:
    """Return, in words, what was tried with wrong codes and versions, and what came of it."""
    code = await machines.code()
    rows = [("the code is mistyped", await machines.refused("b", mistyped(code)))]
    rows += [("the code of another fleet", await machines.refused("b", of_others(code)))]
    rows += [("SpecSoT 0.0.9 joins", await machines.refused("b", code, OLD))]
    rows += [("nobody is there", await machines.refused("b", code.replace(":50059", ":50058")))]
    return rows


async def fetching(machines: Machines) -> Rows:
    """Return what came of it when b joins over a slow line, and its cable is pulled while its layers come;
    then c shows the same code.
    """
    code, hosts = await machines.code(), machines.hosts
    ip("netns", "exec", SWITCH, "tc", "qdisc", "add", "dev", "to-b", "root", "tbf", *SLOW)
    await hosts.start("joined", "b", *machines.specsot("b", "join", code))
    began = time.monotonic()
    await machines.heard(rf"master .* plan .*{JOINED}")
    since = len(hosts.voices.lines)
    await cable("b", "down")()
    await machines.heard(missed(JOINED), since)
    await cable("b", "up")()
    again = time.monotonic()
    ip("netns", "exec", SWITCH, "tc", "qdisc", "del", "dev", "to-b", "root")
    await machines.heard(rf"ring complete .*{JOINED}=", since)
    now = time.monotonic()
    told = f"both in the ring {now - again:.1f} s after it is in again, {now - began:.1f} s after `join`"
    rows = [("its cable is pulled while layers are fetched", told)]
    return [*rows, ("a third machine shows the same code", await machines.refused("c", code))]


async def main(given: argparse.Namespace, words: list[str]) -> int:
    """Run everything, print it, and return 0 if the answers were the same, else 1.

    given: Parsed options.
    words: Further arguments of `specsot serve`.
    """
    hosts, self = Hosts(), asyncio.current_task()
    assert self is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.cancel)
    with tempfile.TemporaryDirectory() as homes:
        machines = Machines(hosts, Path(homes))
        try:
            await machines.share(*words)
            rows = [*await refusals(machines), *await fetching(machines)]
            pulled = "the cable of the machine that joined is pulled until it is missed"
            client = [*on("a"), "specsot"]
            well = await run([Trial(pulled, cut("b", missed(JOINED)))], client, hosts.voices, 3, 2)
            print("\n".join(("", "| what was tried | what came of it |", "|---|---|")))
            print("\n".join(f"| {tried} | {told} |" for tried, told in rows), flush=True)
            return 0 if well else 1
        finally:
            await hosts.end()
            if given.log:
                print(*hosts.voices.lines, sep="\n", file=given.log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=argparse.FileType("w"), help="for all that the services say")
    with network():
        sys.exit(asyncio.run(main(*parser.parse_known_args())))
