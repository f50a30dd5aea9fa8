"""Models with made-up weights: published shapes in memory, and model directories of such shapes.

`python -m specsot_lab.bench.synthetic_models Pythia-2.8B models/pythia-2.8b` writes a directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

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

# Standard deviation of the weights, as most models are initialized.
SPREAD: Final = 0.02
# Factor on the weights of what layers add to the hidden states: so small that the token alone determines
# which one follows.
RESIDUAL_SCALE: Final = 1e-4

# The scaling of rotary frequencies of Llama-3.1, without its factor.
_LLAMA_ROPE: Json = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The configuration of Llama-3.1-8B.
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
# The configuration of Llama-3.1-70B.
_LLAMA_70B: Json = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}

# Published configurations, by name.
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
    """Return the configuration of a shape.

    name: One of SHAPES.

    Raises InvalidRequest for another name.

    The error lists all names.
    """
    if name not in SHAPES:
        raise InvalidRequest(f"no shape is called {name!r}, only {', '.join(SHAPES)}", field="models")
    return make_config(SHAPES[name], {}, Path(name))


class MadeUp(Weights):
    """Weights that have every tensor that is requested, in the shape that is requested."""

    def names(self) -> tuple[str, ...]:
        """Return (), since tensors are made up when they are requested."""
        return ()

    def where(self, name: str) -> str:
        """Return where a tensor comes from: "made up".

        name: The tensor's name; not used.
        """
        return "made up"

    def shape(self, name: str) -> tuple[int, ...]:
        """Raise KeyError, since no tensor has a shape before it is requested.

        name: The tensor's name.
        """
        raise KeyError(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Raise KeyError, since no tensor has a shape before it is requested. `expect` makes tensors.

        name: The tensor's name.
        dtype: The type of its numbers; not used.
        device: Where the tensor would be made; not used.
        """
        raise KeyError(name)

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a new tensor: ones for norms, else normally distributed numbers with standard deviation
        SPREAD.

        name: The tensor's name.
        shape: The tensor's shape.
        dtype: The type of its numbers.
        device: Where the tensor is made.

        A name that contains "norm" counts as a norm. Each call makes new numbers from torch's own seed.
        """
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, SPREAD)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor exists: every tensor except biases and the norms of attention heads.

        name: The tensor's name.
        """
        return not name.endswith((".bias", "_norm.weight"))


class NextTokenWeights(MadeUp):
    """Weights with which the model predicts the next higher token id after every token: 8 after 7, and 0
    after the last.

    What layers add to the hidden states is small, and the lm_head is the embedding moved by one row. If both
    are one tied matrix, the prediction is meaningless.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a new tensor: small weights for what layers add to the hidden states, the moved embedding as
        the lm_head, and for other names what `MadeUp` returns. The embedding must be requested before the
        lm_head.

        name: The tensor's name.
        shape: The tensor's shape.
        dtype: The type of its numbers.
        device: Where the tensor is made.

        Layers add little because the weights of "o_proj" and "down_proj" are multiplied by RESIDUAL_SCALE. An
        lm_head that is requested before the embedding, or has another shape, is random.
        """
        tensor = super().expect(name, shape, dtype, device)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= RESIDUAL_SCALE
        if name.endswith("embed_tokens.weight"):
            self._table = tensor
        if name.endswith("lm_head.weight") and self._table is not None and self._table.shape == tensor.shape:
            tensor.copy_(self._table.roll(1, 0))
        return tensor


def bytes_of_a_token(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of weights that are read to decode one token: all weights, but only one row of the
    embedding.

    config: The model.
    itemsize: Bytes of a number.

    Computed for a model with attention without biases and a gated MLP; two norms are counted for each layer.
    """
    q = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    layer = config.hidden * (2 * q + 2 * kv + 3 * config.intermediate + 2)
    return itemsize * (config.layers * layer + config.hidden * (config.vocab + 1))


def bytes_of_kv(config: ModelConfig, rows: int, itemsize: int) -> int:
    """Return the bytes of KV in all layers; 0 for no rows.

    config: The model.
    rows: Number of KV rows.
    itemsize: Bytes of a number.
    """
    return 2 * config.layers * config.kv_heads * config.head_dim * rows * itemsize


# Seed of the made-up directories.
SEED: Final = 0
# Standard deviation of the weights of what layers add to the hidden states, far below what determines the
# next token.
RESIDUAL_SPREAD: Final = 1e-5
# Logit of the next token. The others are about 0, so that among 50,000 tokens the next one has a probability
# of 96 %.
NEXT_TOKEN_LOGIT: Final = 14.0
# The sizes of a GPT-NeoX configuration, by field.
NeoX = dict[str, int]

# Sizes of the models that can be written as directories, by name.
DIRECTORY_SHAPES: dict[str, NeoX] = {
    "Pythia-2.8B": {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Pythia-70M": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
}
# Token ids of GPT-NeoX models.
VOCAB: Final = 50304
# Fields of every configuration that is written.
NEOX_FIELDS: Final = {
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


def next_token_table(vocab_size: int, num_words: int, unchanged_share: float) -> Tensor:
    """Return which token follows each token, int64 [vocab_size]. The first `num_words` tokens follow each
    other in one cycle. Each later token is its own next token.

    vocab_size: Number of token ids.
    num_words: Number of tokens that the tokenizer has; the others are padding.
    unchanged_share: Fraction, 0..1, of the first `num_words` tokens whose next token is the one they have
        with 1.0. The others exchange their next tokens.

    Padding tokens, from `num_words` on, are not part of the cycle. The same arguments always give the same
    table.
    """
    generator = torch.Generator().manual_seed(SEED)
    cycle = torch.randperm(num_words, generator=generator)
    next_tokens = torch.arange(vocab_size)
    next_tokens[cycle] = cycle.roll(-1)
    rerouted = cycle[torch.rand(num_words, generator=generator) >= unchanged_share]
    next_tokens[rerouted] = next_tokens[rerouted].roll(1)
    return next_tokens


def tensors_of(shape: NeoX, next_tokens: Tensor, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of every tensor of a GPT-NeoX model, and the tensor, in bf16.

    shape: The model's sizes.
    next_tokens: Which token follows each token, [vocab], see `next_token_table`.
    device: A torch device, where tensors are made.

    Equal arguments give equal tensors on one kind of device. Biases are zeros and norms ones. The lm_head is
    the embedding, moved so that the next token has the logit NEXT_TOKEN_LOGIT.
    """
    hidden = shape["hidden_size"]
    torch.manual_seed(SEED)

    def normal(deviation: float, *size: int) -> Tensor:
        """Return a tensor of normally distributed numbers.

        deviation: Their standard deviation; 0 gives zeros.
        size: The tensor's shape.
        """
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, deviation)

    embedding = normal(1.0, len(next_tokens), hidden)
    yield "gpt_neox.embed_in.weight", embedding
    yield (
        "embed_out.weight",
        torch.zeros_like(embedding).index_copy_(
            0, next_tokens.to(device), embedding * (NEXT_TOKEN_LOGIT / hidden)
        ),
    )
    norms = ["gpt_neox.final_layer_norm"]
    for number in range(shape["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{number}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for name, out, size, deviation in (
            ("attention.query_key_value", 3 * hidden, hidden, SPREAD),
            ("attention.dense", hidden, hidden, RESIDUAL_SPREAD),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden, SPREAD),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden, RESIDUAL_SPREAD),
        ):
            yield f"{layer}.{name}.weight", normal(deviation, out, size)
            yield f"{layer}.{name}.bias", normal(0.0, out)
    for name in norms:
        yield f"{name}.weight", normal(0.0, hidden) + 1
        yield f"{name}.bias", normal(0.0, hidden)


def write_directory(
    shape: NeoX, folder: Path, tokenizer: Path, unchanged_share: float = 1.0, device: str = "cpu"
) -> None:
    """Write a model directory as Transformers would write it, with the tokenizer of another model.

    shape: The model's sizes.
    folder: The directory, which is created if it is missing.
    tokenizer: Directory of the model whose tokenizer is copied.
    unchanged_share: See `next_token_table`: the fraction of tokens whose next token is that of a model
        written with 1.0.
    device: A torch device, where tensors are made.

    The weights are in bf16, in one file. Existing files are replaced. Raises OSError if the tokenizer's
    directory has no tokenizer.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.glob("token*.json"):
        shutil.copy(file, folder)
    num_words = len(json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    config = {**NEOX_FIELDS, **shape, "intermediate_size": 4 * shape["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = dict(tensors_of(shape, next_token_table(VOCAB, num_words, unchanged_share), device))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Options of this script.

    name: The model to write, one of DIRECTORY_SHAPES.
    folder: The directory of the model.
    share: Fraction of tokens whose next token is that of a model written with 1.0.
    tokenizer: Directory of the model whose tokenizer is copied; None: that of the demo model.
    device: A torch device, where tensors are made.
    """

    name: Annotated[str, Option(f"One of {', '.join(DIRECTORY_SHAPES)}.", positional=True)]
    folder: Annotated[Path, Option("Directory for the model.", positional=True)]
    share: float = option(1.0, "Share of tokens that are followed as with 1.", min_value=0, max_value=1)
    tokenizer: Path | None = option(
        None, "A model whose tokenizer it gets.", metavar="DIR", unset="the demo's"
    )
    device: str = option("cpu", "Torch device.")


def main(options: SyntheticOptions) -> None:
    """Write a model directory with made-up weights.

    options: What is written.

    Raises InvalidRequest for an unknown model.

    An existing directory is written over. The process exits with the status 0, or with an error if the name
    is unknown.
    """
    if options.name not in DIRECTORY_SHAPES:
        known = ", ".join(DIRECTORY_SHAPES)
        raise InvalidRequest(f"no shape is called {options.name!r}, only {known}", "name")
    tokenizer = options.tokenizer or small_pair() / "base"
    write_directory(DIRECTORY_SHAPES[options.name], options.folder, tokenizer, options.share, options.device)


if __name__ == "__main__":
    main(read("synthetic_models", SyntheticOptions, main.__doc__ or ""))
