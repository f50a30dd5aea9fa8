"""Tiny random models on disk and Transformers' own answers to them, for the model room's tests."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
)

from specsot.members import Layout, Range
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages, Places
from tests.conftest import CACHES

PAGE_ROWS = 16
MODEL_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "glm4_moe", "minimax_m2"),
    *("gpt_oss", "phi3", "gemma2", "gemma3_text", "gpt_neox", "ministral3", "mistral3", "gemma3", "qwen3_vl"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "smollm3"),
    *("olmo2", "olmo3", "granite", "granitemoehybrid", "qwen3_vl_moe", "gemma4_text"),
    *("youtu", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4"),
)
# Those that read images, too: their text, and the least vision that Transformers makes.
IMAGES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 14, "image_size": 28,
                          "num_attention_heads": 2, "num_hidden_layers": 1}  # fmt: skip
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("mistral", {**IMAGES, "model_type": "pixtral", "head_dim": 8}),
    "gemma3": ("gemma3_text", {**IMAGES, "model_type": "siglip_vision_model"}),
    "qwen3_vl": (
        "qwen3_vl_text",
        {"model_type": "qwen3_vl_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16,
         "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 4,
         "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {"model_type": "qwen3_vl_moe_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16,
         "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 4,
         "deepstack_visual_indexes": [0]},
    ),
    **{
        kind: (
            f"{kind}_text",
            {"model_type": f"{kind}_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16,
             "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 4},
        )
        for kind in ("qwen3_5", "qwen3_5_moe")
    },
}  # fmt: skip
GROWING = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 12,
           "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
               "logits_scaling": 1.5}  # fmt: skip
DENSE = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window", "layer_types",
         "rope_parameters")  # fmt: skip
GEMMA4 = {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e3, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 6}  # fmt: skip
LATENT_EXPERTS = {**LATENT, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                  "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
INDEXED = {"index_topk": 224, "index_n_heads": 2, "index_head_dim": 8}
# Transformers would make 128 experts of 768, which takes seconds.
FEW_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{
        kind: {
            "initializer_range": 0.15,  # of 0.25 Transformers itself is 9e-5 from its answer in fp64
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **(
                {}
                if kind in ("qwen3_5", "qwen3_5_text")
                else {
                    "num_experts": 5,
                    "num_experts_per_tok": 3,
                    "moe_intermediate_size": 24,
                    "shared_expert_intermediate_size": 20,
                }
            ),
        }
        for kind in RECURRENT
    },
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 20},
    "ministral3": {"rope_parameters": GROWING},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo3": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": MULTIPLIERS,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {name: value for name, value in GEMMA4.items() if name in DENSE},
    "granitemoehybrid": {
        **MULTIPLIERS,
        "num_local_experts": 0,
        "shared_intermediate_size": 56,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
    },
    "qwen3_vl_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "youtu": LATENT,
    "deepseek_v2": {**LATENT_EXPERTS, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**LATENT_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**LATENT_EXPERTS, **INDEXED},
    "glm_moe_dsa": {**LATENT_EXPERTS, **INDEXED},
    "glm4_moe_lite": LATENT_EXPERTS,
    "mistral4": {**LATENT_EXPERTS, "rope_parameters": GROWING},
}
ONLY_LLAMAS = ("num_key_value_heads", "head_dim")  # what GPT-NeoX has no word for
SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(kind: str = "llama", **changes: Any) -> torch.nn.Module:
    """Transformers' fp32 model of this kind, random."""
    torch.manual_seed(1)
    shape = {name: value for name, value in SHAPE.items() if kind != "gpt_neox" or name not in ONLY_LLAMAS}
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
    # Transformers writes defaults into the rotary settings that a config is given.
    fields = deepcopy({**shape, **FEW_EXPERTS.get(kind, {}), **changes})
    if "kv_lora_rank" in FEW_EXPERTS.get(kind, {}):
        del fields["head_dim"]  # Transformers' own is that of the rotated part
    if kind in WITH_IMAGES:
        text, vision = WITH_IMAGES[kind]
        tied = {"tie_word_embeddings": fields["tie_word_embeddings"], "mm_tokens_per_image": 4}
        fields = {"text_config": {"model_type": text, **fields}, "vision_config": vision, **tied}
    config = AutoConfig.for_model(kind, **fields, **plainly)
    loader = AutoModelForImageTextToText if kind in WITH_IMAGES else AutoModelForCausalLM
    # Transformers' registry has Mistral Small 4 only as a part of a model with images.
    make = Mistral4ForCausalLM._from_config if kind == "mistral4" else loader.from_config
    model = make(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            offset = kind in RECURRENT and not name.endswith("linear_attn.norm.weight")  # 1 + w
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") and not offset else 0.0, 0.2)
        if name.endswith(("router.scale", "expert_scale")):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 0.0, 2.0)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 0.8, 0.1)
    return model


# Models that were saved before: the folder, the model, and the state of torch's generator behind its making.
SAVED: dict[str, tuple[Path, torch.nn.Module, torch.Tensor]] = {}


def write_model(directory: Path, kind: str = "llama", shards: str = "1GB", **changes: Any) -> torch.nn.Module:
    """Save a random model of this kind; returns Transformers' fp32 model of it.

    Saving takes Transformers longer than most tests take, so it saves each model once. The returned model is
    the same one for the same arguments, and nobody changes it.
    """
    name = repr((kind, shards, sorted(changes.items())))
    if name in SAVED:
        folder, model, generator = SAVED[name]
        torch.set_rng_state(generator)
    else:
        folder = Path(mkdtemp(dir=CACHES.name))
        model = make_model(kind, **changes)
        model.save_pretrained(folder, max_shard_size=shards)
        SAVED[name] = folder, model, torch.get_rng_state()
    shutil.copytree(folder, directory, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return model


class ShortRows(KVPages):
    """In fp32, of what fp16 holds: as a CPU's kernels of few bits keep them."""

    def _put_stored(self, layer: int, places: Places, rows: torch.Tensor) -> None:
        super()._put_stored(layer, places, rows.half().float())


def pickle_weights(directory: Path) -> None:
    """Turn a directory's safetensors files into the .bin files of older uploads, shard by shard."""
    for source in directory.glob("*.safetensors"):
        torch.save(load_file(source), directory / pickled(source.name))
        source.unlink()
    for index in directory.glob("*.index.json"):
        listed = json.loads(index.read_text())
        listed["weight_map"] = {name: pickled(file) for name, file in listed["weight_map"].items()}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(listed))
        index.unlink()


def pickled(file: str) -> str:
    return file.replace("model", "pytorch_model").replace(".safetensors", ".bin")


def load(
    directory: Path, cuts: tuple[int, ...] = (3,), device: str = "cpu", pickles: bool = False
) -> list[Decoder]:
    """The model as ranges that end at `cuts`."""
    starts = (0, *cuts[:-1])
    ranges = [Range(first, last) for first, last in zip(starts, cuts)]
    return [Decoder.load(directory, each, torch.float32, device, pickles) for each in ranges]


@dataclass
class Ring:
    """Ranges one behind the other, each with its own pages, fed one sequence."""

    decoders: list[Decoder]
    kvs: list[KVPages]
    layout: Layout = "packed"
    pages: tuple[int, ...] = (5, 2, 3, 9, 0, 1, 4, 15, 6, 7, 8, 10, 14, 11, 12, 13)

    @classmethod
    def of(cls, decoders: list[Decoder], layout: Layout = "packed") -> Ring:
        return cls(decoders, [decoder.make_kv(16, PAGE_ROWS) for decoder in decoders], layout)

    @torch.inference_mode()
    def feed(
        self,
        tokens: list[int],
        start: int,
        positions: list[int] | None = None,
        visible: tuple[int, ...] | None = None,
        taps: dict[int, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits and fused row of `tokens`, whose KV goes to rows start, start + 1, ..."""
        device = self.decoders[0].device
        rows = torch.arange(start, start + len(tokens), device=device)
        slots = torch.tensor(self.pages, device=device)[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS
        span = RowSpan(len(tokens), start, len(tokens), self.pages, visible)
        plan = self.decoders[0].plan([span], PAGE_ROWS, self.layout)
        at = rows if positions is None else torch.tensor(positions, device=device)
        ids = torch.tensor(tokens, device=device)
        hidden, fused = self.decoders[0].embed(ids), None
        for decoder, kv in zip(self.decoders, self.kvs):
            hidden, fused = decoder.forward(hidden, at, slots, plan, kv, taps or {}, fused, ids)
        return self.decoders[-1].logits(hidden), fused

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens, each the argmax behind the one before."""
        return self.write(prompt, count)[0]

    def write(self, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """The same, and the logits of every position of the prompt and of all tokens but the last."""
        told = [self.feed(prompt, 0)[0]]
        written = [int(told[0][-1].argmax())]
        while len(written) < count:
            told.append(self.feed(written[-1:], len(prompt) + len(written) - 1)[0])
            written.append(int(told[-1][-1].argmax()))
        return written, torch.cat(told)


@torch.inference_mode()
def greedy_reference(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The same by Transformers, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
