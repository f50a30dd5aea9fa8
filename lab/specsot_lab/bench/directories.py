"""Model directories of published shapes with made-up weights: `python -m specsot_lab.bench.directories`.

Refuses to know what is measured with them. Bytes and times are those of the real models. Every token tells
the next one, whatever came before it, so two models can be made that agree on a chosen share of all tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from specsot_app.fleets import demo

SEED, SPREAD, FAINT = 0, 0.02, 1e-5  # FAINT: of what layers add, far below what tells the next token
LOGIT = 14.0  # of the next token; all others have about 0, so among 50,000 it has 96 %
NeoX = dict[str, int]

SHAPES: dict[str, NeoX] = {
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
    """int64 [vocab]: which token follows each; tokens from `words` on follow none of those below.

    share: of the tokens below `words` that have the follower they have with share 1.
    """
    dice = torch.Generator().manual_seed(SEED)
    circle = torch.randperm(words, generator=dice)
    after = torch.arange(vocab)
    after[circle] = circle.roll(-1)
    others = circle[torch.rand(words, generator=dice) >= share]
    after[others] = after[others].roll(1)
    return after


def tensors_of(shape: NeoX, after: Tensor, device: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a GPT-NeoX model, by its name, bf16."""
    hidden = shape["hidden_size"]
    torch.manual_seed(SEED)

    def drawn(spread: float, *size: int) -> Tensor:
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
            ("attention.dense", hidden, hidden, FAINT),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden, SPREAD),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden, FAINT),
        ):
            yield f"{layer}.{name}.weight", drawn(spread, out, size)
            yield f"{layer}.{name}.bias", drawn(0.0, out)
    for name in norms:
        yield f"{name}.weight", drawn(0.0, hidden) + 1
        yield f"{name}.bias", drawn(0.0, hidden)


def write(shape: NeoX, folder: Path, tokenizer: Path, share: float = 1.0, device: str = "cpu") -> None:
    """A directory as Transformers would leave it, with the tokenizer of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.glob("token*.json"):
        shutil.copy(file, folder)
    words = len(json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    config = {**COMMON, **shape, "intermediate_size": 4 * shape["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = dict(tensors_of(shape, followers(VOCAB, words, share), device))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Where the model goes.")],
    share: Annotated[float, typer.Option(min=0, max=1, help="Of tokens that are followed as with 1.")] = 1.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model whose tokenizer it gets; the demo's if not given.")
    ] = None,
    device: str = "cpu",
) -> None:
    if name not in SHAPES:
        raise typer.BadParameter(f"no shape is called {name!r}, only {', '.join(SHAPES)}")
    write(SHAPES[name], folder, tokenizer or demo() / "base", share, device)


if __name__ == "__main__":
    typer.run(main)
