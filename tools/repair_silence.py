"""Measures how long a client receives nothing when a worker of a ring of processes is killed amid an answer.

    python tools/repair_silence.py MODEL --stages 3 --kill 0 1 2 --prompt-words 600

Each trial asks once undisturbed and once with `kill -9` of one worker, compares the texts, and prints the
longest silence after the kill, the CPU seconds of all processes until the text continues, and the master's
log lines from the kill on. Wall-clock times are worth something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

# Seconds. How long a fleet may take to load the model and complete its ring.
START_SECONDS = 600.0
# Seconds. How long it may take to end, before it is killed.
STOP_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")
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


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds that the living descendants of a process have used, user and system.

    root: id of the process.
    """
    total = 0
    for pid in descendants(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


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


def trial(fleet: int, port: int, log: Path, number: int, options: argparse.Namespace) -> bool:
    """Ask undisturbed and with one worker killed, print what was measured, and return whether the texts are
    equal.

    fleet: process id of `specsot serve`.
    port: HTTP port of the master.
    log: the fleet's log file.
    number: number of the worker that is killed.
    options: the command line.
    """
    # The first words differ, so that no trial finds the prompt of an earlier one in the prefix cache.
    prompt = f"Trial {time.time_ns()}. " + (WORDS * (options.prompt_words // 36 + 1)) + "Go on."
    began = time.monotonic()
    expected, times = answer(port, prompt, options.tokens, lambda count: None)
    first_token = times[0] - began
    steps = sorted(later - one for one, later in pairwise(times))
    killed = list[float]()
    cpu = dict[str, float]()
    position = 0

    def on_piece(count: int) -> None:
        nonlocal position
        if count == options.after:
            position = log.stat().st_size
            cpu["before"] = cpu_seconds(fleet)
            victim = worker_pid(fleet, number)
            os.kill(victim, signal.SIGKILL)
            killed.append(time.monotonic())
        elif killed and "after" not in cpu and time.monotonic() - killed[0] > 10 * steps[len(steps) // 2]:
            cpu["after"] = cpu_seconds(fleet)

    text, times = answer(port, prompt, options.tokens, on_piece)
    if not killed:
        raise SystemExit(
            f"the answer had {len(times)} pieces, and the kill waits for {options.after} (--after)"
        )
    late = [one for one in times if one >= killed[0]]
    silence, at = max((later - one, one) for one, later in pairwise([killed[0], *late]))
    print(
        f"worker-{number}: silence {silence:.2f} s (from {at - killed[0]:.2f} s after the kill), median step"
        f" {steps[len(steps) // 2]:.3f} s, first token undisturbed {first_token:.2f} s, CPU"
        f" {cpu.get('after', 0) - cpu['before']:.1f} s (the killed process not counted), text"
        f" {'equal' if text == expected else 'DIFFERENT'}"
    )
    if options.log:
        print(log.read_bytes()[position:].decode(errors="replace"))
    return text == expected


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
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    # `specsot serve MODEL --stages N`, with all further arguments of this script.
    command = [
        str(Path(sys.executable).parent / "specsot"), "serve", "--model", options.model,
        "--stages", str(options.stages), "--port", str(options.port), "--http-port", str(options.port + 1),
        *more,
    ]  # fmt: skip
    with log.open("wb") as output:
        fleet = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
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
