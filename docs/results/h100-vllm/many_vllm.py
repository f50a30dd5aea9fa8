"""vLLM's part of ../h100-vllm.md: texts side by side and prompts; ids in and out, greedy, weights made up.

    python many_vllm.py MODELS [K LENGTH]

MODELS: holds `target` and `head`, each with the config.json of Llama-3.1-8B and of its EAGLE-3 head.
K, LENGTH: a chain of so many drafts; tokens of a step, the base's own included (synthetic acceptance).
"""

import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

RANDOM = random.Random(0)
PAGES = 7 << 30  # bytes of KV


def ids(count: int) -> list[int]:
    return [RANDOM.randrange(1000, 30000) for _ in range(count)]


async def ask(engine: Any, prompt: list[int], tokens: int) -> list[tuple[float, int]]:
    """When each output came, and how many tokens it had."""
    delta = RequestOutputKind.DELTA
    asked = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=delta
    )
    log: list[tuple[float, int]] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, asked, f"r{RANDOM.random()}"):
        log.append((time.perf_counter(), len(output.outputs[0].token_ids)))
    return log


async def decode(engine: Any, texts: int, rows: int, tokens: int) -> None:
    """From when all write (and four steps more) until the first ends."""
    logs = await asyncio.gather(*(ask(engine, ids(rows), tokens) for _ in range(texts)))
    first, last = max(log[4][0] for log in logs), min(log[-1][0] for log in logs)
    inside = [[count for at, count in log if first < at <= last] for log in logs]
    steps, written = statistics.median(map(len, inside)), sum(map(sum, inside))
    row = {"texts": texts, "rows in front": rows, "tokens/s": round(written / (last - first), 1)}
    print(json.dumps(row | {"ms a step": round(1e3 * (last - first) / steps, 3)}), flush=True)


async def prefill(engine: Any, rows: int, times: int = 5) -> None:
    """To the first token; the first prompt of a length is not counted."""
    seconds: list[float] = []
    for _ in range(times + 1):
        began = time.perf_counter()
        seconds.append((await ask(engine, ids(rows), 1))[0][0] - began)
    middle = statistics.median(seconds[1:])
    print(
        json.dumps({"prompt": rows, "ms": round(1e3 * middle, 2), "tokens/s": round(rows / middle)}),
        flush=True,
    )


async def main(models: str, drafts: int = 0, length: float = 0.0) -> None:
    sizes = {1, 2, 4, 8, 16, 32, 64} | {(drafts + 1) * texts for texts in (1, 8, 32, 64)}
    asked: dict[str, Any] = {
        "model": f"{models}/target",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 34000,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.32,
        "kv_cache_memory_bytes": PAGES,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": sorted(sizes)},
    }
    if drafts:
        asked["speculative_config"] = {
            "method": "eagle3",
            "model": f"{models}/head",
            "num_speculative_tokens": drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": length,
        }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**asked))
    await asyncio.gather(*(ask(engine, ids(256), 30) for _ in range(64)))
    times = 3 if drafts else 1
    await decode(engine, 1, 1024, 200 * times)
    for texts in (8, 8, 64, 64):
        await decode(engine, texts, 256, 160 * times)
    for rows in () if drafts else (1024, 8192, 32768):
        await prefill(engine, rows)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:3]), *map(float, sys.argv[3:4])))
