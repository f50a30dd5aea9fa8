"""Four hosts on one machine: network namespaces behind a switch, a fleet over them, cables that are pulled.

Needs root, Linux, iproute2 and `make install`:
    python deploy/hosts/hosts.py [CERTIFICATES]
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from trials import LIMIT, WRITTEN, Act, Step, Trial, Voices, run

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SWITCH = "specsot-switch"
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3", "d": "10.77.0.4"}
FAR_HOSTS = {"near": "10.78.0.1", "far": "10.78.0.2"}  # of far_line.py
ADDRESSES = HOSTS | FAR_HOSTS
MEMBERS = 4  # three workers and the drafter
STAGES = 3


def ip(*words: str) -> None:
    """Run iproute2's `ip` with these words. Raises CalledProcessError if it fails."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def network() -> Generator[None]:
    """Within the context there are four namespaces with one address each, all connected to one switch, which
    is a namespace too.
    """
    spaces = [SWITCH, *(f"specsot-{host}" for host in HOSTS)]
    try:
        for space in spaces:
            remove(space)  # what a run left that was killed
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for host, address in HOSTS.items():
            plug_in(host, address)
        yield
    finally:
        for space in spaces:
            remove(space)


def remove(space: str) -> None:
    """Remove a namespace with everything that still runs in it; a missing one is no error."""
    running = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True)
    for process in running.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def plug_in(host: str, address: str) -> None:
    """Connect a host's namespace to the switch.

    address: Address of the host.
    """
    space = f"specsot-{host}"
    ip("link", "add", f"to-{host}", "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", space)
    ip("-n", SWITCH, "link", "set", f"to-{host}", "master", "bridge", "up")
    ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", space, "link", "set", "eth0", "up")


def cable(host: str, state: str) -> Act:
    """Return an act that pulls a host's cable (`state` "down"), or plugs it in again ("up")."""

    async def act() -> None:
        """Set the state of the switch's end."""
        ip("-n", SWITCH, "link", "set", f"to-{host}", state)

    return act


class Hosts:
    """The processes on the hosts, by name, and the lines that they write."""

    def __init__(self) -> None:
        self.voices = Voices()
        self._running: dict[str, Process] = {}
        self._commands: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str, host: str, *command: str) -> None:
        """Start a service and listen to it. `serve` names the services in its own lines, so that its lines
        get no name.

        name: What we call it.
        host: Where it runs; empty for this machine itself.
        command: Its command line.
        """
        self._commands[name] = host, command
        process = await asyncio.create_subprocess_exec(
            *(on(host) if host else ()),
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=ROOT,
            limit=1 << 20,
        )
        self._running[name] = process
        own = None if name == "serve" else name
        self._tasks.append(asyncio.create_task(self.voices.listen(process, own)))

    def tell(self, name: str, number: signal.Signals) -> Act:
        """Return an act that sends a signal to a process.

        name: Name of the process.
        number: The signal.
        """

        async def act() -> None:
            """Send the signal."""
            self._running[name].send_signal(number)

        return act

    def again(self, name: str) -> Act:
        """Return an act that waits until a process has ended, and runs its command once more."""

        async def act() -> None:
            """Wait, and start the command."""
            await self._running[name].wait()
            host, command = self._commands[name]
            await self.start(name, host, *command)

        return act

    async def end(self) -> None:
        """Ask all processes to end, frozen ones too, and wait for them."""
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._running.values()))


def on(host: str) -> list[str]:
    """Return the words that run a command on a host, with this environment's programs."""
    return ["ip", "netns", "exec", f"specsot-{host}", "env", f"PATH={BIN}:{os.environ['PATH']}"]


def asked_for(line: str) -> tuple[str, str, list[str]] | None:
    """Return name, host and command of a line such as "on 10.77.0.2: specsot-worker ... --name worker-0 ...";
    None for any other line.
    """
    if not line.startswith("on "):
        return None
    address, _, command = line.removeprefix("on ").partition(": ")
    words = shlex.split(command)
    host = next(host for host, own in ADDRESSES.items() if own == address)
    return words[words.index("--name") + 1], host, words


async def serve(hosts: Hosts, master: str, stages: Iterable[str], *tls_files: str) -> None:
    """Start a fleet as a person would: what `specsot serve` prints is typed on the other hosts. Return once
    it is ready.

    hosts: Starts the processes.
    master: Its host.
    stages: The host of each.
    tls_files: Further flags of `specsot serve`.
    """
    devices = ",".join(f"{ADDRESSES[host]}#cpu" for host in stages)
    words = ("--devices", devices, "--fleet-listen", f"{ADDRESSES[master]}:50060", *tls_files)
    await hosts.start("serve", master, "specsot", "serve", *words)
    await hosts.voices.until("^waiting for|^specsot: ", 0)
    for line in list(hosts.voices.lines):
        if wanted := asked_for(line):
            name, host, command = wanted
            await hosts.start(name, host, *command)
    await asyncio.wait_for(hosts.voices.until("^ready: ", 0), LIMIT)


def missed(name: str) -> str:
    """Return the pattern of the master's line that this member was lost."""
    return rf"master +\| .*member lost.*{name}"


def trials(hosts: Hosts) -> list[Trial]:
    """Return the trials of a fleet without standby workers."""
    return [
        Trial("a worker's cable is pulled, and plugged in again", cut("b")),
        Trial("a worker's cable is pulled until the answer is written", cut("b", WRITTEN)),
        Trial("a worker is killed, and started again", killed(hosts, "worker-1")),
        Trial("a worker stands still until the answer is written", frozen(hosts, "worker-1")),
        Trial("a worker stands still for a second", stalled(hosts, "worker-1"), harmless=True),
        Trial("the drafter is killed, and started again", killed(hosts, "drafter")),
        Trial("the cable of a worker and the drafter, until the answer is written", cut("d", WRITTEN)),
        Trial("the master's cable is pulled until it misses a worker", cut("a", missed("worker-0"))),
    ]


def cut(host: str, until: str | None = None) -> tuple[Step, ...]:
    """Return the steps that pull a host's cable and plug it in again.

    until: Pattern of a line before the cable is plugged in again; None: at once.
    """
    return Step(f"cable of {host} out", cable(host, "down")), Step("in again", cable(host, "up"), until)


def killed(hosts: Hosts, name: str) -> tuple[Step, ...]:
    """Return the steps that kill a process, and start it again once the master has missed it."""
    kill, again = hosts.tell(name, signal.SIGKILL), hosts.again(name)
    return Step(f"SIGKILL to {name}", kill), Step("started again", again, missed(name))


def frozen(hosts: Hosts, name: str) -> tuple[Step, ...]:
    """Return the steps that freeze a process until the answer is written."""
    stop, go_on = hosts.tell(name, signal.SIGSTOP), hosts.tell(name, signal.SIGCONT)
    return Step(f"SIGSTOP to {name}", stop), Step("SIGCONT", go_on, WRITTEN)


def stalled(hosts: Hosts, name: str) -> tuple[Step, ...]:
    """Return the steps that freeze a process for a second."""
    stop, go_on = hosts.tell(name, signal.SIGSTOP), hosts.tell(name, signal.SIGCONT)

    async def later() -> None:
        """Let the process continue after a second."""
        await asyncio.sleep(1)
        await go_on()

    return Step(f"SIGSTOP to {name}", stop), Step("SIGCONT a second later", later)


async def main(tls_files: list[str]) -> int:
    """Run all trials; return 0 if all answers were the same, else 1.

    tls_files: Empty, or the folder of certificates.
    """
    hosts, self = Hosts(), asyncio.current_task()
    assert self is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.cancel)
    try:
        await serve(hosts, "a", "bcd", *(("--certificates", *tls_files) if tls_files else ("--insecure",)))
        print("\n".join(hosts.voices.lines), flush=True)
        client = [*on("a"), *(shown(*tls_files) if tls_files else ()), "specsot"]
        well = await run(trials(hosts), client, hosts.voices, MEMBERS, STAGES)
        await stand_by(hosts, *(certified(*tls_files) if tls_files else ("--insecure",)))
        replaced = [
            Trial("a worker's cable is pulled, and another one stands by", cut("b", WRITTEN)),
            Trial("a worker is killed, and another one stands by", killed(hosts, "worker-1")[:1]),
        ]
        return 0 if await run(replaced, client, hosts.voices, MEMBERS + 1, STAGES) and well else 1
    finally:
        await hosts.end()


async def stand_by(hosts: Hosts, *tls_files: str) -> None:
    """Start a worker more than the ring needs, on the last host, without layers of its own.

    tls_files: Its flags.
    """
    place = ("--name", "spare", "--listen", f"{HOSTS['d']}:50053", "--master", f"{HOSTS['a']}:50060")
    await hosts.start("spare", "d", "specsot-worker", "--model", "models/demo/base", *place, *tls_files)


def certified(folder: str) -> list[str]:
    """Return the flags of a worker's TLS files.

    folder: Folder of the certificates.
    """
    own = f"{folder}/worker"
    return ["--tls-ca", f"{own}/ca.pem", "--tls-cert", f"{own}/own.pem", "--tls-key", f"{own}/own.key"]


def shown(folder: str) -> list[str]:
    """Return, as variables, what a client trusts and shows.

    folder: Folder of the certificates.
    """
    return [f"SPECSOT_TLS_CA={folder}/ca.pem", f"SPECSOT_TOKEN_FILE={folder}/token"]


if __name__ == "__main__":
    with network():
        sys.exit(asyncio.run(main(sys.argv[1:])))
