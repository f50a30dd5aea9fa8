"""Prints the table of GPU memory in tests/app/predecessors.md, as `specsot plan` computes it.

python tools/pairs.py

The pairs of base model and head are those of SpecSoT's predecessors (the "seeds"). No weights are needed: a
base model is only its config.json, and a head is a sparse safetensors file with a header and no data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specsot.core.info import memory_in_words
from specsot_app.fleet.fitting import plan_fleet
from specsot_app.fleet.options import FleetOptions

POSITIONS = 8192  # KV positions of the table.
DRAFTED = 32000  # Number of token ids that an EAGLE-3 head drafts.
VICUNA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
# Base, its published config, the kind of its head, and the memory that seed 000 requires and recommends.
PAIRS = (
    ("Llama-3.1-8B-Instruct", LLAMA, "EAGLE-3", "16 GB", "24 GB"),
    ("Qwen3-4B", QWEN3, "EAGLE-3", "8 GB", "16 GB"),
    ("vicuna-7b-v1.3", VICUNA, "EAGLE-2", "14 GB", "24 GB"),
)


def main() -> None:
    """Print the table in Markdown."""
    print(
        "| base and head | weights | KV | graphs | head, with its KV and graphs | together "
        "| with `--quantization int8` | the seed: at least | the seed recommends |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, config, kind, least, recommended in PAIRS:
        with TemporaryDirectory() as spot:
            options = write_pair(Path(spot), config, kind)
            parts, eight = parts_of(options), parts_of(replace(options, quantization="int8"))
        sizes = " | ".join(map(memory_in_words, (*parts, eight[-1])))
        print(f"| {name}, {kind} | {sizes} | {least} | {recommended} |")


def parts_of(options: FleetOptions) -> tuple[int, ...]:
    """Return the bytes of weights, KV of POSITIONS positions, graphs and drafter, and their sum.

    options: The pair, on one GPU.
    """
    plan = plan_fleet(options)
    exact = plan.stages[0].kv // plan.positions * POSITIONS
    (stage,) = plan_fleet(replace(options, kv_memory=exact)).stages
    return stage.weights, stage.kv, stage.graphs, stage.drafter, stage.need


def write_pair(folder: Path, config: Mapping[str, Any], kind: str) -> FleetOptions:
    """Write a pair without weights, and return the options of a fleet that uses it.

    folder: An empty folder.
    config: The base model's config.json.
    kind: "EAGLE-2" or "EAGLE-3".
    """
    base, head = folder / "base", folder / "head"
    for directory in (base, head):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
    write_shapes(head / "model.safetensors", dict(shapes_of(config, kind)))
    return FleetOptions(str(base), dtype="bf16", draft_model=str(head), devices="h#0=80G")


def shapes_of(config: Mapping[str, Any], kind: str) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a head's tensors by name, in the layout of EAGLE's authors.

    config: The base model's config.json; the head has its hidden size.
    kind: "EAGLE-2" or "EAGLE-3".
    """
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    keys, three = config.get("num_key_value_heads", heads) * dim, kind == "EAGLE-3"
    at, read = ("midlayer", 2 * hidden) if three else ("layers.0", hidden)
    layer: dict[str, tuple[int, ...]] = {
        f"{at}.self_attn.q_proj.weight": (heads * dim, read),
        f"{at}.self_attn.k_proj.weight": (keys, read),
        f"{at}.self_attn.v_proj.weight": (keys, read),
        f"{at}.self_attn.o_proj.weight": (hidden, heads * dim),
        f"{at}.mlp.gate_proj.weight": (inner, hidden),
        f"{at}.mlp.up_proj.weight": (inner, hidden),
        f"{at}.mlp.down_proj.weight": (hidden, inner),
        f"{at}.post_attention_layernorm.weight": (hidden,),
    }
    if not three:
        embedding = (config["vocab_size"], hidden)
        return layer | {"fc.weight": (hidden, 2 * hidden), "embed_tokens.weight": embedding}
    norms = {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    ends = {"norm.weight": (hidden,), "lm_head.weight": (DRAFTED, hidden), "d2t": (DRAFTED,)}
    return layer | norms | ends | {"fc.weight": (hidden, 3 * hidden), "t2d": (config["vocab_size"],)}


def write_shapes(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a sparse safetensors file: a header for bf16 tensors, and no data.

    file: The file.
    shapes: Shape of each tensor by name.
    """
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


if __name__ == "__main__":
    main()
