"""Models with made-up weights: published shapes in memory, and model directories of them.

`python -m specsot_lab.bench.synthetic_models Pythia-2.8B models/pythia-2.8b` writes a directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import save_file
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, make_config
from specsot.checkpoint.fields import Json
from specsot.errors import InvalidRequest
from specsot.service.command import read
from specsot.service.option_table import Option, option
from specsot_app.fleet.demo import small_pair
from specsot_model.weights import Weights

# Standard deviation of the weights, as most models begin.
SPREAD = 0.02  # of the weights, as most models begin
FAINT = 1e-4  # of their usual size: what layers add, so that a token says which one follows

_LLAMA_ROPE: Json = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_8B: Json = {
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
    "rope_theta": 500000.0,
    "rope_scaling": {**_LLAMA_ROPE, "factor": 8.0},
    "tie_word_embeddings": False,
}
_LLAMA_70B: Json = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}

SHAPES: Mapping[str, Json] = {
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-70B": _LLAMA_70B,
    "Qwen3-4B": {
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
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}


def config_of(name: str) -> ModelConfig:
    """Return the config of one of SHAPES. Raises InvalidRequest for another name."""
    if name not in SHAPES:
        raise InvalidRequest(f"no shape is called {name!r}, only {', '.join(SHAPES)}", field="models")
    return make_config(SHAPES[name], {}, Path(name))


class MadeUp(Weights):
    """Weights that have every tensor that is asked for, in the shape that is asked for."""

    def names(self) -> tuple[str, ...]:
        """Return no names, since tensors are made up when they are asked for."""
        return ()

    def where(self, name: str) -> str:
        """Return where a tensor comes from: "made up"."""
        return "made up"

    def shape(self, name: str) -> tuple[int, ...]:
        """Raise KeyError, since no tensor has a shape before it is asked for."""
        raise KeyError(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Raise KeyError, since no tensor has a shape before it is asked for."""
        raise KeyError(name)

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a new tensor: ones for norms, else normally distributed with the standard
        deviation SPREAD.
        """
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, SPREAD)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor exists: all but biases and norms of heads."""
        return not name.endswith((".bias", "_norm.weight"))


class Telling(MadeUp):
    """Weights of the right sizes with which every token says the next: its number and one more.

    What layers add is small, and lm_head is the embedding moved by one row. Where both are one matrix
    nothing is told.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a new tensor: faint where layers add to the hidden states, and the moved embedding as
        lm_head.
        """
        made = super().expect(name, shape, dtype, device)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made *= FAINT
        if name.endswith("embed_tokens.weight"):
            self._table = made
        if name.endswith("lm_head.weight") and self._table is not None and self._table.shape == made.shape:
            made.copy_(self._table.roll(1, 0))
        return made


def bytes_of_a_token(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of weights that one decoded token must read: all but the embedding's other rows.
    itemsize: bytes of a number.
    """
    q = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    layer = config.hidden * (2 * q + 2 * kv + 3 * config.intermediate + 2)
    return itemsize * (config.layers * layer + config.hidden * (config.vocab + 1))


def bytes_of_kv(config: ModelConfig, rows: int, itemsize: int) -> int:
    """Return the bytes of KV of so many rows in all layers. itemsize: bytes of a number."""
    return 2 * config.layers * config.kv_heads * config.head_dim * rows * itemsize


SEED = 0
FAINT_BLOCKS = 1e-5  # of what layers add, far below what tells the next token
LOGIT = 14.0  # of the next token; all others have about 0, so among 50,000 it has 96 %
NeoX = dict[str, int]

DIRECTORY_SHAPES: dict[str, NeoX] = {
    "Pythia-2.8B": {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Pythia-70M": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
}
VOCAB = 50304
COMMON = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


def followers(vocab: int, words: int, share: float) -> Tensor:
    """Return int64 [vocab]: which token follows each; tokens from `words` on follow none of those below.

    share: fraction of the tokens below `words` that have the follower they have with share 1.
    """
    dice = torch.Generator().manual_seed(SEED)
    circle = torch.randperm(words, generator=dice)
    after = torch.arange(vocab)
    after[circle] = circle.roll(-1)
    others = circle[torch.rand(words, generator=dice) >= share]
    after[others] = after[others].roll(1)
    return after


def tensors_of(shape: NeoX, after: Tensor, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a GPT-NeoX model, by its name, in bf16. shape: sizes. after: [vocab] which token
    follows each. device: a torch device.
    """
    hidden = shape["hidden_size"]
    torch.manual_seed(SEED)

    def drawn(spread: float, *size: int) -> Tensor:
        """Return a tensor of this size, normally distributed with this standard deviation."""
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, spread)

    embedding = drawn(1.0, len(after), hidden)
    yield "gpt_neox.embed_in.weight", embedding
    yield (
        "embed_out.weight",
        torch.zeros_like(embedding).index_copy_(0, after.to(device), embedding * (LOGIT / hidden)),
    )
    norms = ["gpt_neox.final_layer_norm"]
    for number in range(shape["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{number}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for name, out, size, spread in (
            ("attention.query_key_value", 3 * hidden, hidden, SPREAD),
            ("attention.dense", hidden, hidden, FAINT_BLOCKS),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden, SPREAD),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden, FAINT_BLOCKS),
        ):
            yield f"{layer}.{name}.weight", drawn(spread, out, size)
            yield f"{layer}.{name}.bias", drawn(0.0, out)
    for name in norms:
        yield f"{name}.weight", drawn(0.0, hidden) + 1
        yield f"{name}.bias", drawn(0.0, hidden)


def write_directory(
    shape: NeoX, folder: Path, tokenizer: Path, share: float = 1.0, device: str = "cpu"
) -> None:
    """Write a model directory as Transformers would leave it, with the tokenizer of another model.

    shape: sizes. folder: created if missing. tokenizer: directory that has it. share: see `followers`.
        device: on which tensors are made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.glob("token*.json"):
        shutil.copy(file, folder)
    words = len(json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    config = {**COMMON, **shape, "intermediate_size": 4 * shape["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = dict(tensors_of(shape, followers(VOCAB, words, share), device))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Options of this script."""

    name: Annotated[str, Option(f"One of {', '.join(DIRECTORY_SHAPES)}.", positional=True)]
    folder: Annotated[Path, Option("Directory for the model.", positional=True)]
    share: float = option(1.0, "Share of tokens that are followed as with 1.", least=0, most=1)
    tokenizer: Path | None = option(
        None, "A model whose tokenizer it gets.", metavar="DIR", unset="the demo's"
    )
    device: str = option("cpu", "Torch device.")


def main(given: SyntheticOptions) -> None:
    if given.name not in DIRECTORY_SHAPES:
        known = ", ".join(DIRECTORY_SHAPES)
        raise InvalidRequest(f"no shape is called {given.name!r}, only {known}", "name")
    tokenizer = given.tokenizer or small_pair() / "base"
    write_directory(DIRECTORY_SHAPES[given.name], given.folder, tokenizer, given.share, given.device)


if __name__ == "__main__":
    main(read("synthetic_models", SyntheticOptions, main.__doc__ or ""))
