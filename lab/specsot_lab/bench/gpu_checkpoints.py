"""Model directories of published shapes with made-up weights, as services load them.

The base says the next number behind every token (see `shapes.Telling`), the head is
right in shape alone; the demo model lends its tokenizer, whose ids the text never leaves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specsot.model.config import Json
from specsot_lab.bench.gpu_drafts import VOCABULARY
from specsot_lab.bench.synthetic_models import MadeUp, Telling

LENT = ("tokenizer.json", "tokenizer_config.json")
EACH = 4  # layers of a file
ENDS = {"bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "bfloat16"}

Shapes = dict[str, tuple[int, ...]]


def write_base(folder: Path, config: Json, lender: Path, device: str = "cuda") -> Path:
    """config: one of SHAPES, a Llama's. lender: the directory whose tokenizer it gets."""
    folder.mkdir(parents=True)
    made, index = Telling(), dict[str, str]()
    for number, shapes in enumerate(_files(config)):
        name = f"model-{number:05}.safetensors"
        save_file(_made(made, shapes, device), folder / name)
        index |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config, **ENDS}))
    for name in LENT:
        shutil.copy(lender / name, folder / name)
    return folder


def write_head(folder: Path, config: Json, device: str = "cuda") -> Path:
    """An EAGLE-3 head of one layer for such a base."""
    folder.mkdir(parents=True)
    hidden, vocab = config["hidden_size"], min(VOCABULARY, config["vocab_size"])
    shapes = {
        f"midlayer.{name}": shape for name, shape in _layer(config, 2 * hidden).items() if "input" not in name
    }
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    tensors = _made(MadeUp(), shapes, device)
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.long)
    tensors["t2d"] = torch.arange(config["vocab_size"]) < vocab
    save_file(tensors, folder / "model.safetensors")
    told = {"num_hidden_layers": 1, "draft_vocab_size": vocab, "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps({**config, **ENDS, **told}))
    return folder


def _files(config: Json) -> Iterator[Shapes]:
    """The embedding with lm_head, which is made of it; then some layers each."""
    wide = (config["vocab_size"], config["hidden_size"])
    yield {
        "model.embed_tokens.weight": wide,
        "lm_head.weight": wide,
        "model.norm.weight": (config["hidden_size"],),
    }
    for first in range(0, config["num_hidden_layers"], EACH):
        yield {
            f"model.layers.{layer}.{name}": shape
            for layer in range(first, min(first + EACH, config["num_hidden_layers"]))
            for name, shape in _layer(config, config["hidden_size"]).items()
        }


def _layer(config: Json, inputs: int) -> Shapes:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _made(made: MadeUp, shapes: Shapes, device: str) -> dict[str, Tensor]:
    return {name: made.expect(name, shape, torch.bfloat16, device).cpu() for name, shape in shapes.items()}
