"""SpecSoT's part of ../h100-vllm.md: the same texts and prompts by the loop of `specsot bench gpu`."""

import json

import torch

from specsot.members import Range, TreeShape
from specsot_drafter.loader import measure_levels
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import Drafting, GpuLoop
from specsot_lab.bench.gpu_product import measure_prompts
from specsot_lab.bench.gpu_replay import scaled_ranks
from specsot_lab.bench.gpu_speculation import DEPTH, NODES, ROWS, TAU, TOP_K
from specsot_lab.bench.synthetic_models import NextTokenWeights, config_of
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder

PAGES, MANY = 1300, (8, 8, 64, 64)


def run(ring: GpuLoop, way: str, texts: int, rows: int, steps: int) -> None:
    clock = ring.run(rows, texts, steps)
    row = {
        "way": way,
        "texts": texts,
        "rows in front": rows,
        "tokens/s": round(clock.tokens / clock.total_seconds, 1),
    }
    row |= {
        "ms a step": round(1e3 * clock.total_seconds / steps, 3),
        "tokens a step": round(clock.tokens / steps / texts, 2),
    }
    parts = {f"{part} ms": round(1e3 * seconds / steps, 3) for part, seconds in clock.seconds.items()}
    print(json.dumps(row | parts), flush=True)


@torch.inference_mode()
def main() -> None:
    config = config_of("Llama-3.1-8B")
    device = torch.device("cuda", 0)
    decoder = Decoder(config, NextTokenWeights(), Range(0, config.layers), torch.bfloat16, device)
    plain = GpuLoop(decoder, PAGES, ROWS, None)
    run(plain, "plain", 1, 1024, 200)
    for texts in MANY:
        run(plain, "plain", texts, 256, 160)
    del plain
    torch.cuda.empty_cache()
    for row in measure_prompts(decoder):
        print(json.dumps(row), flush=True)
    torch.cuda.empty_cache()
    head = made_up_head(decoder, head_shape(config))
    curve = tuple((rows, one * config.layers) for rows, one in measure_rows(decoder))
    ranks, tuned = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES), TreeShape()
    ways = {
        "defaults": Drafting(head, tuned, ranks[: tuned.top_k], ROWS, curve, measure_levels(head)),
        "trees of 24": Drafting(head, TreeShape(7, 4, 24, fixed=True), ranks[:4], ROWS),
        "chains of 4": Drafting(head, TreeShape(4, 1, 5, fixed=True), ranks[:1], ROWS),
        "trees of 8, four levels": Drafting(head, TreeShape(4, 2, 8, fixed=True), ranks[:2], ROWS),
    }
    for way, drafting in ways.items():
        ring = GpuLoop(decoder, PAGES, ROWS, drafting)
        run(ring, way, 1, 1024, 100)
        for texts in MANY:
            run(ring, way, texts, 256, 100)
        del ring
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
