"""Measures how long a client receives nothing when a worker of a ring of processes is killed amid an answer.

    python tools/repair_silence.py MODEL --stages 3 --kill 0 1 2 --prompt-words 600

Each trial asks once undisturbed and once with `kill -9` of one worker, and compares the texts. It prints the
longest silence after the kill, and for each phase of the repair its seconds and the CPU seconds of every
process. Wall-clock times are worth something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import IO

# Seconds. How long a fleet may take to load the model and complete its ring.
START_SECONDS = 600.0
# Seconds. How long a fleet may take to end before it is killed.
STOP_SECONDS = 60.0
# What is asked after the sentences of WORDS. The answer repeats none of them, so that some drafts are wrong.
QUESTION = "\n\nForget all that, and write a story about a clockmaker who loses her hearing."
# Ticks per second in which the kernel counts CPU time.
TICKS = os.sysconf("SC_CLK_TCK")
# Seconds between two looks at the processes' CPU time.
SAMPLE_SECONDS = 0.02
# Words of the master's log lines that end the phases of a repair, with what the phases are called.
PHASES = (
    ("] member lost", "loss detected"),
    ("] plan", "layers assigned, KV kept"),
    ("] ring complete", "ring complete"),
)
WORDS = (
    "The tide follows the moon, rivers carry salt into the sea, and the wind moves the water of the surface. "
    "Ships wait for high water, birds look for food on the flats, and people build walls against storms. "
)


def descendants(root: int) -> dict[int, str]:
    """Return the command line of a process's living descendants by process id; the process itself is left
    out.

    root: id of the process.
    """
    parents = dict[int, int]()
    commands = dict[int, str]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    found = dict[int, str]()
    level = {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= {pid: commands[pid] for pid in level}
    return found


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU seconds, user and system, that each living descendant of a process has used, by the name
    of its service and its process id.

    root: id of the process.
    """
    found = dict[str, float]()
    for pid, command in descendants(root).items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        name = re.search(r"(worker-\d+|specsot_master|drafter)", command)
        found[f"{name[1] if name else 'other'}:{pid}"] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


class FleetLog:
    """The fleet's log lines, each with the time at which it was read."""

    def __init__(self, output: IO[bytes]) -> None:
        """Start a thread that reads the lines.

        output: the fleet's standard output.
        """
        self.lines = list[tuple[float, str]]()
        self._output = output
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Store lines with the times at which they arrive, until the fleet closes its output."""
        for line in self._output:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def since(self, moment: float) -> list[tuple[float, str]]:
        """Return the lines that were read after a moment, each with its time.

        moment: a time of the monotonic clock, in seconds.
        """
        return [one for one in self.lines if one[0] >= moment]


class CpuSamples:
    """CPU seconds of a process's descendants over time, sampled by a thread until `stop` is called."""

    def __init__(self, root: int) -> None:
        """Start sampling.

        root: id of the process.
        """
        self._root = root
        self._samples = [(time.monotonic(), cpu_seconds(root))]
        self._running = True
        self._thread = Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        """Take a sample every SAMPLE_SECONDS, until `stop` is called."""
        while self._running:
            time.sleep(SAMPLE_SECONDS)
            self._samples.append((time.monotonic(), cpu_seconds(self._root)))

    def stop(self) -> None:
        """Stop sampling."""
        self._running = False
        self._thread.join()

    def between(self, first: float, last: float) -> dict[str, float]:
        """Return the CPU seconds that each process used between two moments, by name and process id.
        Processes that used less than one tick of the kernel (0.01 s) are left out. The numbers are as coarse
        as the ticks and the samples. A process that ended before `last` is left out as well.

        first: the first moment, a time of the monotonic clock in seconds, after sampling began.
        last: the last moment. If sampling ended before it, the newest sample counts.
        """
        before = [used for moment, used in self._samples if moment <= first][-1]
        after = next((used for moment, used in self._samples if moment >= last), self._samples[-1][1])
        used = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        return {name: seconds for name, seconds in sorted(used.items()) if seconds > 0.005}


def worker_pid(root: int, number: int) -> int:
    """Return the process id of the fleet's worker with this number. Raises LookupError if it does not run.

    root: process id of `specsot serve`.
    number: number of the worker, from 0.
    """
    for pid, command in descendants(root).items():
        if f"worker-{number} " in command + " " and "worker" in command:
            return pid
    raise LookupError(f"worker-{number} does not run")


def pieces(port: int, prompt: str, tokens: int) -> Iterator[str]:
    """Yield the pieces of one streamed greedy answer as they arrive.

    port: HTTP port of the master.
    prompt: the user's message.
    tokens: number of tokens to generate.
    """
    body = {
        "model": "", "messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0,
        "max_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if text := choices[0].get("delta", {}).get("content"):
                    yield text


def answer(port: int, prompt: str, tokens: int, on_piece: Callable[[int], None]) -> tuple[str, list[float]]:
    """Ask once; return the text and the time of each piece.

    port: HTTP port of the master.
    prompt: the user's message.
    tokens: number of tokens to generate.
    on_piece: called with the number of pieces so far after each piece.
    """
    text = ""
    times = list[float]()
    for piece in pieces(port, prompt, tokens):
        text += piece
        times.append(time.monotonic())
        on_piece(len(times))
    return text, times


def wait_until_ready(port: int, fleet: subprocess.Popen[bytes]) -> None:
    """Wait until the fleet's ring is complete. Raises SystemExit if the fleet ends before.

    port: HTTP port of the master.
    fleet: the process of `specsot serve`.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if fleet.poll() is not None:
            raise SystemExit("the fleet ended before its ring was complete")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no ring after {START_SECONDS:g} s")


def longest_silence(killed: float, times: Sequence[float]) -> tuple[float, float]:
    """Return the longest time without text after a moment, in seconds, and the time at which it ended.

        # killed at 10.0, pieces at 9.8, 10.1, 12.0, 12.1 -> (1.9, 12.0)

    killed: the moment, a time of the monotonic clock in seconds.
    times: times of all pieces of the answer, ascending.

    Raises SystemExit if no piece came after the moment, so that the silence has no end.
    """
    late = [one for one in times if one >= killed]
    if not late:
        raise SystemExit("no text arrived after the kill: no other worker took over, or the answer was over")
    return max((later - one, later) for one, later in pairwise([killed, *late]))


def trial(fleet: int, port: int, log: FleetLog, number: int, options: argparse.Namespace) -> bool:
    """Ask undisturbed and with one worker killed, print what was measured, and return whether the texts are
    equal. The worker is killed once `options.after` pieces of the second answer have arrived.

    fleet: process id of `specsot serve`.
    port: HTTP port of the master.
    log: the fleet's log.
    number: number of the worker that is killed.
    options: the command line.

    Raises SystemExit if an answer has too few pieces, and LookupError if the worker does not run.
    """
    # The first words differ, so that no trial finds the prompt of an earlier one in the prefix cache.
    prompt = f"Trial {time.time_ns()}. {WORDS * (options.prompt_words // 36)}{QUESTION}"
    cpu = CpuSamples(fleet)
    began = time.monotonic()
    expected, times = answer(port, prompt, options.tokens, lambda count: None)
    if not times:
        raise SystemExit("\n".join(["no text arrived:", *(line for _, line in log.since(began))]))
    first_token, ended = times[0], times[-1]
    steps = sorted(later - one for one, later in pairwise(times))
    killed = list[float]()

    def on_piece(count: int) -> None:
        """Kill the worker with piece number `options.after`.

        count: number of pieces so far.
        """
        if count == options.after:
            victim = worker_pid(fleet, number)
            killed.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    text, times = answer(port, prompt, options.tokens, on_piece)
    cpu.stop()
    if not killed:
        raise SystemExit(
            f"the answer had {len(times)} pieces, and the kill waits for {options.after} (--after)"
        )
    silence, resumed = longest_silence(killed[0], times)
    began_after = resumed - silence - killed[0]
    print(
        f"worker-{number}: silence {silence:.2f} s (from {began_after:.2f} s after the kill), median step"
        f" {steps[len(steps) // 2]:.3f} s, first token undisturbed {first_token - began:.2f} s with"
        f" {sum(cpu.between(began, first_token).values()):.2f} CPU s, whole answer"
        f" {sum(cpu.between(began, ended).values()):.2f} CPU s, text"
        f" {'equal' if text == expected else 'DIFFERENT'}"
    )
    first = killed[0]
    for name, last in (*phase_ends(log.since(first)), ("first token", resumed)):
        used = cpu.between(first, last)
        by_process = ", ".join(f"{process} {seconds:.2f}" for process, seconds in used.items())
        print(f"  {name:26} {last - first:6.2f} s, CPU {sum(used.values()):5.2f} s: {by_process}")
        first = last
    if options.log:
        print(*(f"{moment - killed[0]:8.3f} {line}" for moment, line in log.since(killed[0])), sep="\n")
    sys.stdout.flush()
    return text == expected


def phase_ends(lines: Sequence[tuple[float, str]]) -> Iterator[tuple[str, float]]:
    """Yield the name of each phase of the first repair in a log, and the time of its end, in the order of
    PHASES. A phase whose line is missing is left out.

    lines: the log's lines from the kill on, each with its time.
    """
    for words, name in PHASES:
        if moment := next((moment for moment, line in lines if words in line), None):
            yield name, moment


def main() -> int:
    """Run the trials that the command line asks for; return 1 if a text was changed by a repair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--kill", type=int, nargs="+", default=[1], help="numbers of the workers, in turn")
    parser.add_argument("--prompt-words", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--after", type=int, default=40, help="kill after so many pieces of text")
    parser.add_argument("--port", type=int, default=51950)
    parser.add_argument("--log", action="store_true", help="print the fleet's log from the kill on")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds between two trials")
    options, more = parser.parse_known_args()
    # `specsot serve MODEL --stages N`, with all further arguments of this script.
    command = [
        str(Path(sys.executable).parent / "specsot"), "serve", "--model", options.model,
        "--stages", str(options.stages), "--port", str(options.port), "--http-port", str(options.port + 1),
        *more,
    ]  # fmt: skip
    fleet = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert fleet.stdout
    log = FleetLog(fleet.stdout)
    equal = True
    try:
        wait_until_ready(options.port + 1, fleet)
        for index, number in enumerate(options.kill):
            if index:
                time.sleep(options.settle)
            equal &= trial(fleet.pid, options.port + 1, log, number, options)
    finally:
        fleet.send_signal(signal.SIGINT)
        try:
            fleet.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            fleet.kill()
    return not equal


if __name__ == "__main__":
    sys.exit(main())
