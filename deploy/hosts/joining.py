"""Lets a second machine join by a code, over network namespaces: wrong codes, an old version, pulled cables.

Needs root, Linux, iproute2 and `make install`:
    python deploy/hosts/joining.py [--log FILE] [arguments of `specsot serve`, such as --demo small]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from dataclasses import dataclass
from pathlib import Path

from hosts import SWITCH, Hosts, cable_steps, ip, lost_pattern, network, on_host, set_cable
from trials import LIMIT, Trial, run

SHARED = "10.77.0.1:50060"  # Address at which members reach the first machine.
JOINED = "10.77.0.2:50051"  # Name and address of a worker on b.
# Python code that runs `specsot` with an old version number.
OLD = (
    "import specsot._version as version; version.__version__ = '0.0.9'; "
    "from specsot_app.cli import main; raise SystemExit(main())"
)
SLOW = ("rate", "20mbit", "burst", "32kb", "latency", "300ms")  # Line on which layers are fetched.
# Pairs of (what was tried, what came of it).
Rows = list[tuple[str, str]]


@dataclass(slots=True)
class Machines:
    """The first machine on host a; others join from hosts b and c.

    hosts: The running processes.
    state_folders: Folder with a folder for each machine's state and cache; a alone has the model.
    """

    hosts: Hosts
    state_folders: Path

    def specsot(self, host: str, *words: str, code: str | None = None) -> list[str]:
        """Return the words that run `specsot` with a host's own state and cache.

        Host a keeps the usual cache, since it has the model; any other host has a cache of its own.

        host: Name of the host.
        words: Arguments of `specsot`.
        code: Python code that runs instead of `specsot`; None: `specsot` itself.
        """
        command = ["specsot"] if code is None else ["python", "-c", code]
        folders = [
            f"XDG_STATE_HOME={self.state_folders / host}",
            f"XDG_CACHE_HOME={self.state_folders / host}",
        ]
        return ["env", *folders[: 1 if host == "a" else 2], *command, *words]

    async def share(self, *words: str) -> None:
        """Start `specsot serve --share` on the first machine.

        words: Further arguments of `specsot serve`.
        """
        addresses = ("--fleet-listen", SHARED, "--dtype", "fp32", "--http-port", "8000")
        await self.hosts.start("serve", "a", *self.specsot("a", "serve", "--share", *addresses, *words))

    async def code(self, num_earlier: int = 0) -> str:
        """Return the newest code that the first machine printed.

        num_earlier: Number of earlier lines, which do not count.
        """
        return (await self.wait_for_line("^on the next machine: ", num_earlier)).split()[-1]

    async def wait_for_line(self, pattern: str, num_earlier: int = 0) -> str:
        """Return the first line with a pattern; wait for it at most LIMIT seconds.

        pattern: Regular expression.
        num_earlier: Number of earlier lines, which do not count.
        Raises TimeoutError after that time.
        """
        return await asyncio.wait_for(self.hosts.service_log.wait_for(pattern, num_earlier), LIMIT)

    async def try_to_join(self, host: str, joined_code: str, code: str | None = None) -> str:
        """Return the last line that a machine prints which may not join, and its exit status.

        Raises TimeoutError if the command runs longer than LIMIT seconds, IndexError if it prints nothing.

        host: Name of the host.
        joined_code: The code to join with.
        code: Python code that runs instead of `specsot`; None: `specsot` itself.
        """
        words = [*on_host(host), *self.specsot(host, "join", joined_code, code=code)]
        client = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        output, _ = await asyncio.wait_for(client.communicate(), LIMIT)
        return f"`{output.decode().strip().splitlines()[-1]}`, status {client.returncode}"


def mistyped(code: str) -> str:
    """Return the code of the same fleet with another secret.

    code: A code that is valid.
    """
    return code[:-4] + ("AAAA" if code[-4:] != "AAAA" else "BBBB")


def code_of_other_fleet(code: str) -> str:
    """Return the code of another fleet at the same address.

    code: A code that is valid.
    """
    address, _, encoded = code.rpartition("/")
    return f"{address}/{'A' if encoded[0] != 'A' else 'B'}{encoded[1:]}"


async def refusals(machines: Machines) -> Rows:
    """Return pairs of (what was tried, what came of it) for wrong codes and versions.

    The rows are a mistyped code, the code of another fleet, an old version, and a port without a server. A
    refused code stays valid.

    machines: The machines, of which the first one shares its fleet.
    """
    code = await machines.code()
    rows = [("the code is mistyped", await machines.try_to_join("b", mistyped(code)))]
    rows += [("the code of another fleet", await machines.try_to_join("b", code_of_other_fleet(code)))]
    rows += [("SpecSoT 0.0.9 joins", await machines.try_to_join("b", code, OLD))]
    rows += [("no server listens there", await machines.try_to_join("b", code.replace(":50059", ":50058")))]
    return rows


async def fetching(machines: Machines) -> Rows:
    """Return pairs of (what was tried, what came of it): b joins over a slow line, and its cable is pulled
    while its layers come; then c shows the same code.

    Raises TimeoutError if one of the expected lines does not come within LIMIT seconds.

    machines: The machines, of which the first one shares its fleet.
    """
    code = await machines.code()
    hosts = machines.hosts
    ip("netns", "exec", SWITCH, "tc", "qdisc", "add", "dev", "to-b", "root", "tbf", *SLOW)
    await hosts.start("joined", "b", *machines.specsot("b", "join", code))
    began = time.monotonic()
    await machines.wait_for_line(rf"master .* plan .*{JOINED}")
    num_earlier = len(hosts.service_log.lines)
    await set_cable("b", "down")
    await machines.wait_for_line(lost_pattern(JOINED), num_earlier)
    await set_cable("b", "up")
    plugged_in = time.monotonic()
    ip("netns", "exec", SWITCH, "tc", "qdisc", "del", "dev", "to-b", "root")
    await machines.wait_for_line(rf"ring complete .*{JOINED}=", num_earlier)
    now = time.monotonic()
    result = (
        f"both in the ring {now - plugged_in:.1f} s after it is in again, {now - began:.1f} s after `join`"
    )
    rows = [("its cable is pulled while layers are fetched", result)]
    return [*rows, ("a third machine shows the same code", await machines.try_to_join("c", code))]


async def main(options: argparse.Namespace, words: list[str]) -> int:
    """Run everything, print it, and return 0 if the answers were the same, else 1.

    The rows are printed as a table. All processes are ended before the call returns or raises, and the
    services' lines are then written to the log's file, if there is one.

    options: Parsed options, which name the log's file.
    words: Further arguments of `specsot serve`.
    """
    hosts = Hosts()
    try:
        with tempfile.TemporaryDirectory() as state_folders:
            async with hosts:
                machines = Machines(hosts, Path(state_folders))
                await machines.share(*words)
                rows = [*await refusals(machines), *await fetching(machines)]
                pulled = "the cable of the machine that joined is pulled until it is missed"
                trial = Trial(pulled, cable_steps("b", lost_pattern(JOINED)))
                all_same = await run([trial], [*on_host("a"), "specsot"], hosts.service_log, 3, 2)
                print("\n".join(("", "| what was tried | what came of it |", "|---|---|")))
                print("\n".join(f"| {tried} | {result} |" for tried, result in rows), flush=True)
                return 0 if all_same else 1
    finally:
        if options.log:
            print(*hosts.service_log.lines, sep="\n", file=options.log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=argparse.FileType("w"), help="file for the lines of the services")
    with network():
        sys.exit(asyncio.run(main(*parser.parse_known_args())))
