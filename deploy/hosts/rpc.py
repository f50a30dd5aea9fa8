"""Compares llama.cpp's RPC with SpecSoT over the same slow line: two hosts, half of a model's layers each.

The hosts are network namespaces, and each member computes with one thread, so that all share this machine.
Needs root, Linux, iproute2, `make install`, and llama.cpp with RPC, which no wheel has:
    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B peer -G Ninja -DGGML_RPC=ON \\
        -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_MTMD=OFF -DLLAMA_BUILD_UI=OFF \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF
    ninja -C peer ggml-rpc-server llama-bench
    python deploy/hosts/rpc.py --peer peer/bin --model FILE.gguf --draft-model HEAD [--rtt 1 10 50]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from typing import Any

from far_line import delayed, far_hosts
from hosts import FAR_HOSTS, Hosts, on_host, serve
from trials import LIMIT, MASTER, wait_complete

from specsot.checkpoint.config import read_config
from specsot.checkpoint.resolving import resolve_model
from specsot_bench.core.tables import figure, markdown, text
from specsot_lab.bench.delay_proxy import exact_loop
from specsot_lab.bench.llamacpp import QUESTIONS

PORT = "50052"  # Port of llama.cpp's server.
# Arguments of `specsot infer` for each way of answering.
WAYS: Mapping[str, tuple[str, ...]] = {
    "plain": ("--mode", "direct", "--drafter", "none", "--ignore-eos"),
    "drafts": ("--mode", "direct", "--ignore-eos"),
    "planned": ("--mode", "sot"),
}
# Name of the other system in the table.
PEER = "llama.cpp"


async def json_of(*command: str) -> Any:
    """Return the last output of a command on the near host, parsed as JSON. Ends this script if the command
    fails.

    Output that begins with "[" is parsed whole, any other by its last line. Raises TimeoutError after LIMIT
    seconds.

    command: The command and its arguments.
    """
    process = await asyncio.create_subprocess_exec(
        *on_host("near"), *command, stdin=DEVNULL, stdout=PIPE, limit=1 << 24
    )
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(output.decode() if output.startswith(b"[") else output.splitlines()[-1])


async def measure_llamacpp(options: argparse.Namespace) -> list[float]:
    """Return llama.cpp's tokens a second in each round while it writes one text, prompts not counted.

    Half of the layers run on the far host. Raises TimeoutError if its server does not start within LIMIT
    seconds.

    options: The options of this script.
    """
    layers = read_config(resolve_model(options.model)).layers
    server = (
        "stdbuf",
        "-oL",
        f"{options.peer}/ggml-rpc-server",
        "-H",
        FAR_HOSTS["far"],
        "-p",
        PORT,
        "-t",
        "1",
    )
    async with Hosts() as hosts:
        await hosts.start("rpc", "far", *server)
        await asyncio.wait_for(hosts.service_log.wait_for("Starting RPC server|endpoint", 0), LIMIT)
        split = ("--rpc", f"{FAR_HOSTS['far']}:{PORT}", "-ngl", str(layers // 2), "-t", "1")
        work = ("-p", "0", "-n", str(options.tokens), "-r", str(options.rounds), "-o", "json")
        runs = await json_of(f"{options.peer}/llama-bench", "-m", options.model, *split, *work)
        return runs[0]["samples_ts"]


async def measure_specsot(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the statistics of whole requests, prompts included, by way; the ways take turns.

    A planned answer may have four times as many tokens as a direct one. The first round is not among the
    statistics. If something fails, the services' lines are printed on stderr.

    options: The options of this script.
    """
    statistics_by_way = {way: list[dict[str, Any]]() for way in WAYS}
    model = (
        "--model",
        options.model,
        "--draft-model",
        options.draft_model,
        "--quantization",
        options.quantization,
    )
    async with Hosts() as hosts:
        await serve(hosts, "near", FAR_HOSTS, "--insecure", *model)
        await asyncio.wait_for(wait_complete([*on_host("near"), "specsot"], 3, 2), LIMIT)
        # The first round only warms up.
        for number in range(options.rounds + 1):
            for way in sorted(WAYS, reverse=bool(number % 2)):
                limit = options.tokens * (4 if way == "planned" else 1)
                words = (*WAYS[way], "--max-new-tokens", str(limit), QUESTIONS[number % len(QUESTIONS)])
                event = await json_of("specsot", "infer", "--master", MASTER, "--json", *words)
                statistics_by_way[way] += [event["statistics"]] if number else []
    return statistics_by_way


def rows_of(
    rtt: float,
    before: Sequence[float],
    statistics_by_way: Mapping[str, Sequence[Any]],
    after: Sequence[float],
):
    """Return one row for each way of answering, that of llama.cpp first. "tau" and "branches" are None where
    they do not apply.

    "ratio" is the median rate divided by llama.cpp's median rate of both runs.

    rtt: Delay of both directions together, in milliseconds.
    before: Tokens a second of llama.cpp in each round before our runs.
    statistics_by_way: Statistics of our requests, by the way of answering.
    after: Tokens a second of llama.cpp in each round after our runs.
    """
    peer_rates = [*before, *after]
    rates = {
        PEER: peer_rates,
        **{
            way: [run["completion_tokens"] / run["seconds"] for run in statistics_by_way[way]] for way in WAYS
        },
    }
    return [
        {
            "rtt": rtt,
            "way": way,
            "rate": statistics.median(way_rates),
            "range": f"{min(way_rates):.1f} .. {max(way_rates):.1f}",
            "ratio": statistics.median(way_rates) / statistics.median(peer_rates),
            "tau": statistics.mean(run["mean_accepted"] for run in statistics_by_way[way])
            if way in WAYS
            else None,
            "branches": statistics.mean(run["branches"] for run in statistics_by_way[way])
            if way == "planned"
            else None,
        }
        for way, way_rates in rates.items()
    ]


# Columns of the table.
COLUMNS = (
    figure("RTT ms", "rtt", 0),
    text("", "way"),
    figure("tokens/s: median", "rate", 1),
    text("range", "range"),
    figure("of llama.cpp", "ratio"),
    figure("tau", "tau"),
    figure("branches", "branches", 1),
)


async def main(options: argparse.Namespace, ends: tuple[int, int]) -> None:
    """Measure every distance, and print a table after each.

    llama.cpp is measured before and after SpecSoT at each distance. Each table has the rows of all distances
    so far.

    options: The options of this script.
    ends: File descriptors of both ends of the line between the hosts.
    """
    rows: list[dict[str, Any]] = []
    for rtt in options.rtt:
        with delayed(ends, rtt / 2000):
            rows += rows_of(
                rtt,
                await measure_llamacpp(options),
                await measure_specsot(options),
                await measure_llamacpp(options),
            )
        print(markdown(COLUMNS, rows), flush=True)


def read() -> argparse.Namespace:
    """Return the parsed command line.

    The options name llama.cpp's folder, the model, the head, the quantization, the round-trip times in
    milliseconds, the number of tokens and of rounds. Exits with status 2 for an unknown or missing option.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rtt", type=float, nargs="+", default=[1.0, 10.0, 50.0], metavar="MS")
    parser.add_argument(
        "--tokens",
        type=int,
        default=64,
        help="of a direct answer, 16 at least; four times as many of a planned one",
    )
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with far_hosts() as line, asyncio.Runner(loop_factory=exact_loop) as runner:
        runner.run(main(read(), line))
