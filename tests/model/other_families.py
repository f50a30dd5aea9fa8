"""Families that run through Transformers' own modules: tiny models of each, and how near ours is to theirs.

`python -m tests.model.other_families --write` measures all of them and writes docs/other-families.md.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specsot.members import Range
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.transformers_layers.shapes import LayerShape, layer_shapes
from tests.model.tiny import PAGE_ROWS, SHAPE, Ring

PAGE = Path(__file__).parents[2] / "docs" / "other-families.md"
PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
CHUNK = [11, 40, 52, 63, 70, 81]  # of a branch, behind a page that it shares
NODES, PARENTS = [12, 44, 55, 66, 77], (None, 0, 0, 2, 2)  # a tree behind the same page
NEAR, CLEAR = 1e-4, 0.1  # the largest difference of logits, and the least median gap of the two best
WINDOW = 7
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ABSENT = object()  # a field of SHAPE that the family does not have
WINDOWS = {"sliding_window": WINDOW, "layer_types": MIXED}
BY_LAYER = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in
            (("full_attention", 1e4), ("sliding_attention", 300.0))}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "head_dim": ABSENT, "q_lora_rank": 16, "kv_lora_rank": 12,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}  # fmt: skip
# By model_type: the fields in which a tiny model differs from SHAPE.
KINDS: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **WINDOWS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 5, "moe_topk": 2},
    "axk1": {**LATENT, **ROUTED},
    "beam": {**WINDOWS},
    "bitnet": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **WINDOWS},
    "cohere2_moe": {"logit_scale": 1.0, **EXPERTS, **WINDOWS},
    "cohere_compass_text": {**WINDOWS, "rope_parameters": BY_LAYER},
    "cwm": {**WINDOWS},
    "dots1": {**ROUTED, **WINDOWS},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 24},
    "exaone4": {**WINDOWS},
    "exaone_moe": {**EXPERTS, **WINDOWS},
    "flex_olmo": {**EXPERTS},
    "flint": {**EXPERTS, **ROUTED},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "granite_swa": {**WINDOWS},
    "granitemoe": {**EXPERTS},
    "granitemoe_swa": {**EXPERTS, **WINDOWS},
    "granitemoeshared": {**EXPERTS},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 2},
    "hy_v3": {**EXPERTS},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "kolibri1": {**EXPERTS, **ROUTED},
    "laguna": {**EXPERTS, **WINDOWS},
    "mellum": {**EXPERTS, **WINDOWS},
    "mimo_v2_flash": {**ROUTED, **WINDOWS, "v_head_dim": 6, "swa_v_head_dim": 6},
    "minicpm3": {**LATENT},
    "ministral": {**WINDOWS},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmoe": {**EXPERTS},
    "persimmon": {},
    "phi": {},
    "phimoe": {**EXPERTS, "sliding_window": WINDOW},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 20},
    "seed_oss": {},
    "solar_open": {**ROUTED},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {**WINDOWS},
}


@dataclass(frozen=True)
class Likeness:
    """How near our layers are to Transformers' whole model of a family.

    difference: The largest difference of any logit: of a prompt, of a branch and of a tree.
    gap: The median gap between the two best logits.
    shapes: What the layers store and see.
    """

    difference: float
    gap: float
    shapes: tuple[LayerShape, ...]


def make_other(kind: str, **changes: Any) -> torch.nn.Module:
    """Transformers' fp32 model of this kind, random."""
    torch.manual_seed(1)
    fields = {**SHAPE, **KINDS[kind], **changes}
    fields = {name: value for name, value in fields.items() if value is not ABSENT}
    config = AutoConfig.for_model(kind, **fields)
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **plainly).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            # Norms keep their mean, 0 or 1; sinks and biases of all kinds are drawn around 0.
            mean = float(parameter.detach().mean().round()) if name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter, mean, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    return model


def write_other(directory: Path, kind: str, **changes: Any) -> torch.nn.Module:
    """Save a random model of this kind; returns Transformers' fp32 model of it."""
    model = make_other(kind, **changes)
    model.save_pretrained(directory)
    return model


def only_through_transformers() -> AbstractContextManager[object]:
    """A context in which our decoder knows no family."""
    return mock.patch.dict("specsot.checkpoint.config.FAMILIES", clear=True)


def load_other(directory: Path, cuts: tuple[int, ...]) -> list[Decoder]:
    """The model as ranges that end at `cuts`, through Transformers even if our decoder knows the family."""
    with only_through_transformers():
        starts = (0, *cuts[:-1])
        ranges = [Range(first, last) for first, last in zip(starts, cuts)]
        return [Decoder.load(directory, each, torch.float32, "cpu") for each in ranges]


@torch.inference_mode()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Transformers' logits of every position."""
    return model(torch.tensor([tokens])).logits[0]


def compare(kind: str, directory: Path) -> Likeness:
    """Write a tiny model, and compare our logits to Transformers', one layer per range."""
    model = write_other(directory, kind)
    layers = model.config.num_hidden_layers
    decoders = load_other(directory, tuple(range(1, layers + 1)))
    expected = logits_of(model, PROMPT)
    prompt, _ = Ring.of(decoders).feed(PROMPT, 0)
    differences = [prompt - expected, *(ours - theirs for ours, theirs in branch_and_tree(model, decoders))]
    best = expected.topk(2).values
    gap = (best[:, 0] - best[:, 1]).median()
    difference = max(float(one.abs().max()) for one in differences)
    return Likeness(difference, float(gap), layer_shapes(decoders[0].config))


@torch.inference_mode()
def branch_and_tree(
    model: torch.nn.Module, decoders: list[Decoder]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our logits and Transformers' of one frame: a prompt chunk and a tree, behind a page that they share."""
    ring = Ring.of(decoders, "batched")
    ring.feed(PROMPT[:PAGE_ROWS], 0)
    shared, own = ring.pages[0], (ring.pages[1], ring.pages[2])
    depths, seen = list[int](), list[int]()
    for row, parent in enumerate(PARENTS):
        depths.append(0 if parent is None else depths[parent] + 1)
        seen.append(1 << row | (0 if parent is None else seen[parent]))
    spans = [
        RowSpan(len(CHUNK), PAGE_ROWS, len(CHUNK), (shared, own[0])),
        RowSpan(len(NODES), PAGE_ROWS, len(NODES), (shared, own[1]), tuple(seen)),
    ]
    positions = torch.tensor([PAGE_ROWS + row for row in (*range(len(CHUNK)), *depths)])
    slots = [own[0] * PAGE_ROWS + row for row in range(len(CHUNK))]
    slots += [own[1] * PAGE_ROWS + row for row in range(len(NODES))]
    hidden = decoders[0].embed(torch.tensor(CHUNK + NODES))
    plan = decoders[0].plan(spans, PAGE_ROWS, "batched")
    for decoder, kv in zip(decoders, ring.kvs):
        hidden, _ = decoder.forward(hidden, positions, torch.tensor(slots), plan, kv)
    chunk, tree = decoders[-1].logits(hidden).split([len(CHUNK), len(NODES)])
    pairs = [(chunk, logits_of(model, PROMPT[:PAGE_ROWS] + CHUNK)[PAGE_ROWS:])]
    for row in range(len(NODES)):
        path = [node for node in range(row + 1) if seen[row] >> node & 1]
        theirs = logits_of(model, PROMPT[:PAGE_ROWS] + [NODES[node] for node in path])[PAGE_ROWS:]
        pairs.append((tree[path], theirs))
    return pairs


HEAD = """# Families that run through Transformers

A model whose `model_type` SpecSoT's own decoder does not have ([those that it has](models.md#families)) runs
through the modules of [Transformers](https://github.com/huggingface/transformers).
`pip install 'specsot[families]'` pins its release, {release}. Layer ranges, trees, branches, drafters, KV
pages (also in int8), sliding windows, attention sinks and softcaps work as with other families. Code from a
model's directory is never run. A worker logs `layers run through Transformers` at its start; `specsot plan`
and `specsot verify` say it, too.

* **No CUDA graphs**, and neither fused nor packed layers. How much longer a step takes was not measured.
* **`--quantization`** rounds the products (`nn.Linear`) of layers; a family whose experts are one tensor
  refuses it. Weights that were published quantized are decoded.
* **Refused in one line, before weights are loaded**: layers with a recurrent state or a convolution, KV of
  another layer, embeddings of each layer or of positions, several attentions in a layer, sparse and chunked
  attention, encoder-decoders, models that read images, `--tensor-parallel`, `--batch-invariant`. A layer that
  mixes rows otherwise than by attention is found when it is loaded. A request's
  [window](design.md#kv-policies) is refused, too.
* **RoPE** that would switch with the length is the same for all sequences: longrope has its long factors
  where the context is longer than the original one; dynamic NTK is off up to `max_position_embeddings`, where
  texts end.
* Each family of the table was tested on a tiny random model; no published checkpoint was loaded. A family
  that is not in the table runs unless it is refused.

`python -m tests.model.other_families --write` measures the table. *Difference*: the largest difference of a
logit from Transformers' whole model (fp32, eager attention), one layer per range, over a prompt of 20 tokens,
and over a frame of a branch and a tree that share a page. *Gap*: the median difference of the two best logits
of the prompt. *Heads*: query heads / KV heads of a key's size (x a value's), of each kind of layer. CI tests
{ci} of the families, `make test-all` all.

| family (`model_type`) | difference | gap | windows | heads |
|---|---:|---:|---|---|
"""


def heads_in_words(shapes: tuple[LayerShape, ...]) -> str:
    """The heads of a model's layers: "4/2 of 8", of both kinds if layers differ."""
    words = list[str]()
    for one in shapes:
        values = "" if one.value_dim == one.key_dim else f"x{one.value_dim}"
        words.append(f"{one.heads}/{one.kv_heads} of {one.key_dim}{values}")
    return ", ".join(dict.fromkeys(words))


def table() -> str:
    """The page with a row for every family, all of them measured now."""
    rows = list[str]()
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            likeness = compare(kind, Path(directory))
        windows = sum(shape.window is not None for shape in likeness.shapes)
        seen = f"{windows} of {len(likeness.shapes)} layers" if windows else ""
        numbers = f"{likeness.difference:.0e} | {likeness.gap:.2f}"
        rows.append(f"| `{kind}` | {numbers} | {seen} | {heads_in_words(likeness.shapes)} |")
    from specsot_model.transformers_layers.interface import RELEASE
    from tests.model.test_other_families import IN_CI

    return HEAD.format(release=RELEASE, ci=len(IN_CI)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = table()
    if "--write" in sys.argv:
        PAGE.write_text(page)
    else:
        print(page)
