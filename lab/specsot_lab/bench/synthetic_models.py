"""Model directories of published shapes with made-up weights.

`python -m specsot_lab.bench.synthetic_models Pythia-2.8B models/pythia-2.8b` writes a directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from specsot.errors import InvalidRequest
from specsot.service.command import read
from specsot.service.option_table import Option, option
from specsot_app.fleet.demo import small_pair

# Standard deviation of the weights, as most models are initialized.
SPREAD: Final = 0.02
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
