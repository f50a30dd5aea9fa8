"""Simulates four hosts by network namespaces on a switch, runs a fleet over them, and pulls their cables.

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
from functools import partial
from pathlib import Path

from trials import ANSWER_FINISHED, LIMIT, ServiceLog, Step, Trial, run

ROOT = Path(__file__).resolve().parents[2]
# Folder of this environment's programs.
BIN = Path(sys.executable).parent
# Name of the namespace that is the switch.
SWITCH = "specsot-switch"
# Addresses of the hosts by name.
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3", "d": "10.77.0.4"}
FAR_HOSTS = {"near": "10.78.0.1", "far": "10.78.0.2"}  # Hosts of far_line.py.
# Addresses of all hosts by name.
ADDRESSES = HOSTS | FAR_HOSTS
MEMBERS = 4  # Three workers and the drafter.
# Number of stages of the ring.
STAGES = 3


def ip(*words: str) -> None:
    """Run iproute2's `ip`.

    words: Arguments of `ip`.
    Raises CalledProcessError if the command fails.
    """
    subprocess.run(["ip", *words], check=True)


@contextmanager
def network() -> Generator[None]:
    """Within the context, which yields None, there are four namespaces with one address each, all connected
    to one switch, which is a namespace too.

    Namespaces of these names that exist already are removed first, and everything is removed at the end,
    with all processes that run in it. Raises CalledProcessError if a command of iproute2 fails.
    """
    spaces = [SWITCH, *(f"specsot-{host}" for host in HOSTS)]
    try:
        for space in spaces:
            remove_namespace(space)  # A killed run may have left it.
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for host, address in HOSTS.items():
            plug_in(host, address)
        yield
    finally:
        for space in spaces:
            remove_namespace(space)


def remove_namespace(space: str) -> None:
    """Remove a namespace with everything that still runs in it; a missing namespace is no error.

    Processes are ended by SIGKILL.

    space: Name of the namespace.
    """
    running = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True)
    for process in running.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def plug_in(host: str, address: str) -> None:
    """Connect a host's namespace to the switch.

    The host's end is eth0 in the host's namespace, the switch's end is called "to-HOST". Raises
    CalledProcessError if a command of iproute2 fails.

    host: Name of the host, a key of HOSTS.
    address: Address of the host.
    """
    space = f"specsot-{host}"
    ip("link", "add", f"to-{host}", "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", space)
    ip("-n", SWITCH, "link", "set", f"to-{host}", "master", "bridge", "up")
    ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", space, "link", "set", "eth0", "up")


async def set_cable(host: str, state: str) -> None:
    """Pull a host's cable, or plug it in again, by the state of the switch's end.

    Raises CalledProcessError if the state cannot be set.

    host: Name of the host, a key of HOSTS.
    state: "down" to pull the cable, "up" to plug it in.
    """
    ip("-n", SWITCH, "link", "set", f"to-{host}", state)


class Hosts:
    """The processes on the hosts, by name, and the lines that they write.

    Use it in `async with`: SIGTERM then cancels the task of that block, and at the end of the block all
    processes are ended.
    """

    def __init__(self) -> None:
        self.service_log = ServiceLog()
        self._running: dict[str, Process] = {}
        self._commands: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Hosts:
        """Let SIGTERM cancel the current task, and return the object itself."""
        this_task = asyncio.current_task()
        assert this_task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
        return self

    async def start(self, name: str, host: str, *command: str) -> None:
        """Start a service and record its lines. `serve` names the services in its own lines, so that its
        lines get no name.

        The output of the process, stdout and stderr together, is recorded until it ends. The call returns
        once the process runs; a later process of the same name replaces the earlier one in the table of
        processes, which is not ended.

        name: Name of the process, by which it is found later.
        host: Host on which it runs, a key of ADDRESSES; empty: this machine itself.
        command: The command and its arguments.
        """
        self._commands[name] = host, command
        process = await asyncio.create_subprocess_exec(
            *(on_host(host) if host else ()),
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=ROOT,
            limit=1 << 20,
        )
        self._running[name] = process
        prefix = None if name == "serve" else name
        self._tasks.append(asyncio.create_task(self.service_log.listen(process, prefix)))

    async def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process.

        Raises KeyError if no process of this name was started, and ProcessLookupError if it has ended.

        name: Name of the process.
        number: The signal to send.
        """
        self._running[name].send_signal(number)

    async def restart(self, name: str) -> None:
        """Wait until a process has ended, without limit, and run its command once more, on the same host as
        before and under the same name.

        name: Name of the process.
        """
        await self._running[name].wait()
        host, command = self._commands[name]
        await self.start(name, host, *command)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ask all processes to end, frozen ones too, and wait for them. If the block failed, print their
        lines on stderr.

        Processes that have ended already are skipped. A process that ignores SIGTERM is waited for without
        limit.
        """
        if error is not None:
            print(*self.service_log.lines, sep="\n", file=sys.stderr)
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._running.values()))


def on_host(host: str) -> list[str]:
    """Return the words that run a command on a host, with this environment's programs.

    host: Name of the host, a key of ADDRESSES.
    """
    return ["ip", "netns", "exec", f"specsot-{host}", "env", f"PATH={BIN}:{os.environ['PATH']}"]


def parse_start_line(line: str) -> tuple[str, str, list[str]] | None:
    """Return (name, host, command) of a line such as "on 10.77.0.2: specsot-worker ... --name worker-0 ...";
    None for any other line.

    Raises StopIteration if the address is none of ADDRESSES, ValueError if the command has no `--name`.

    line: A line that `specsot serve` printed.
    """
    if not line.startswith("on "):
        return None
    address, _, command = line.removeprefix("on ").partition(": ")
    words = shlex.split(command)
    host = next(host for host, host_address in ADDRESSES.items() if host_address == address)
    return words[words.index("--name") + 1], host, words


async def serve(hosts: Hosts, master: str, stages: Iterable[str], *tls_files: str) -> None:
    """Start a fleet as a person would: what `specsot serve` prints is typed on the other hosts. Return once
    it is ready.

    If `specsot serve` fails, its line "specsot: ..." ends the first wait, and the second one raises
    TimeoutError after LIMIT seconds.

    hosts: Starts the processes, and records their lines.
    master: Host of the master.
    stages: Host of each stage, in ring order.
    tls_files: Further flags of `specsot serve`, such as those of TLS.
    """
    devices = ",".join(f"{ADDRESSES[host]}#cpu" for host in stages)
    words = ("--devices", devices, "--fleet-listen", f"{ADDRESSES[master]}:50060", *tls_files)
    await hosts.start("serve", master, "specsot", "serve", *words)
    await hosts.service_log.wait_for("^waiting for|^specsot: ", 0)
    for line in list(hosts.service_log.lines):
        if service := parse_start_line(line):
            name, host, command = service
            await hosts.start(name, host, *command)
    await asyncio.wait_for(hosts.service_log.wait_for("^ready: ", 0), LIMIT)


def lost_pattern(name: str) -> str:
    """Return the pattern of the master's line that says that a member was lost.

    name: Name of the member.
    """
    return rf"master +\| .*member lost.*{name}"


def trials(hosts: Hosts) -> list[Trial]:
    """Return the trials of a fleet without standby workers.

    hosts: The running processes.
    """
    return [
        Trial("a worker's cable is pulled, and plugged in again", cable_steps("b")),
        Trial("a worker's cable is pulled until the answer is written", cable_steps("b", ANSWER_FINISHED)),
        Trial("a worker is killed, and started again", kill_steps(hosts, "worker-1")),
        Trial("a worker stands still until the answer is written", freeze_steps(hosts, "worker-1")),
        Trial("a worker stands still for a second", stall_steps(hosts, "worker-1"), harmless=True),
        Trial("the drafter is killed, and started again", kill_steps(hosts, "drafter")),
        Trial(
            "the cable of a worker and the drafter, until the answer is written",
            cable_steps("d", ANSWER_FINISHED),
        ),
        Trial(
            "the master's cable is pulled until it misses a worker",
            cable_steps("a", lost_pattern("worker-0")),
        ),
    ]


def cable_steps(host: str, repair_pattern: str | None = None) -> tuple[Step, ...]:
    """Return the two steps that pull a host's cable and plug it in again.

    host: Name of the host, a key of HOSTS.
    repair_pattern: Pattern of the line that must come before the cable is plugged in again; None: it is
        plugged in at once.
    """
    pull = Step(f"cable of {host} out", partial(set_cable, host, "down"))
    return pull, Step("in again", partial(set_cable, host, "up"), repair_pattern)


def kill_steps(hosts: Hosts, name: str) -> tuple[Step, ...]:
    """Return the two steps that kill a process, and start it again once the master has declared it lost.

    hosts: The running processes.
    name: Name of the process.
    """
    kill = Step(f"SIGKILL to {name}", partial(hosts.send_signal, name, signal.SIGKILL))
    return kill, Step("started again", partial(hosts.restart, name), lost_pattern(name))


def freeze_steps(hosts: Hosts, name: str) -> tuple[Step, ...]:
    """Return the two steps that freeze a process until the answer is written.

    hosts: The running processes.
    name: Name of the process.
    """
    stop = Step(f"SIGSTOP to {name}", partial(hosts.send_signal, name, signal.SIGSTOP))
    return stop, Step("SIGCONT", partial(hosts.send_signal, name, signal.SIGCONT), ANSWER_FINISHED)


def stall_steps(hosts: Hosts, name: str) -> tuple[Step, ...]:
    """Return the two steps that freeze a process for a second.

    The second step waits for a second before it sends SIGCONT.

    hosts: The running processes.
    name: Name of the process.
    """

    async def resume_later() -> None:
        """Let the process continue after a second."""
        await asyncio.sleep(1)
        await hosts.send_signal(name, signal.SIGCONT)

    stop = Step(f"SIGSTOP to {name}", partial(hosts.send_signal, name, signal.SIGSTOP))
    return stop, Step("SIGCONT a second later", resume_later)


async def main(tls_files: list[str]) -> int:
    """Run all trials; return 0 if all answers were the same, else 1.

    The first run has three workers and a drafter; a second run adds a standby worker, and runs even if an
    answer of the first one differed. All processes are ended before the call returns or raises; SIGTERM
    cancels the trials.

    tls_files: The folder of certificates as the only entry; empty: no TLS.
    """
    async with Hosts() as hosts:
        await serve(hosts, "a", "bcd", *(("--certificates", *tls_files) if tls_files else ("--insecure",)))
        print("\n".join(hosts.service_log.lines), flush=True)
        client = [*on_host("a"), *(client_variables(*tls_files) if tls_files else ()), "specsot"]
        all_same = await run(trials(hosts), client, hosts.service_log, MEMBERS, STAGES)
        await start_standby(hosts, *(worker_tls_flags(*tls_files) if tls_files else ("--insecure",)))
        standby_trials = [
            Trial("a worker's cable is pulled, and another one stands by", cable_steps("b", ANSWER_FINISHED)),
            Trial("a worker is killed, and another one stands by", kill_steps(hosts, "worker-1")[:1]),
        ]
        return (
            0 if await run(standby_trials, client, hosts.service_log, MEMBERS + 1, STAGES) and all_same else 1
        )


async def start_standby(hosts: Hosts, *tls_files: str) -> None:
    """Start a worker more than the ring needs, on the last host, without layers of its own.

    hosts: Starts the process.
    tls_files: Flags of the worker's TLS files, or `--insecure`.
    """
    address_flags = ("--name", "spare", "--listen", f"{HOSTS['d']}:50053", "--master", f"{HOSTS['a']}:50060")
    await hosts.start(
        "spare", "d", "specsot-worker", "--model", "models/demo/base", *address_flags, *tls_files
    )


def worker_tls_flags(folder: str) -> list[str]:
    """Return the flags of a worker's TLS files.

    folder: Folder of the certificates.
    """
    worker_folder = f"{folder}/worker"
    return [
        "--tls-ca",
        f"{worker_folder}/ca.pem",
        "--tls-cert",
        f"{worker_folder}/own.pem",
        "--tls-key",
        f"{worker_folder}/own.key",
    ]


def client_variables(folder: str) -> list[str]:
    """Return environment variables that name the CA which a client trusts and the token which it sends.

    folder: Folder of the certificates.
    """
    return [f"SPECSOT_TLS_CA={folder}/ca.pem", f"SPECSOT_TOKEN_FILE={folder}/token"]


if __name__ == "__main__":
    with network():
        sys.exit(asyncio.run(main(sys.argv[1:])))
