"""Makes `small/`: a language model of two layers, trained on what the demo base itself wrote.

Knows nothing of how it will be used. Rows are what `specsot train` leaves, which lets the base answer first:

    python models/demo/train_small.py head/training/rows.npz models/demo/base models/demo/small --steps 2400
"""

from __future__ import annotations

import json
import math
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specsot_lab.train.rows import Row, load, split

LENGTH, BLOCKS, RATE, WARMUP, HELD_OUT = 512, 6, 4e-3, 40, 0.02


def main() -> None:
    parser = ArgumentParser(description="A small language model that drafts for the demo base.")
    for name in ("rows", "base", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    given = parser.parse_args()
    torch.manual_seed(0)
    learned, held = split(load(given.rows), HELD_OUT, seed=0)
    model = new_model(given.base)
    train(model, learned, held, given.steps)
    model.to(torch.bfloat16).save_pretrained(given.output)
    tokenizer = json.loads((given.base / "tokenizer.json").read_text())
    compact = json.dumps(tokenizer, separators=(",", ":"), ensure_ascii=False)
    (given.output / "tokenizer.json").write_text(compact)


def new_model(base: Path) -> LlamaForCausalLM:
    """Its embedding begins as the base's, cut to the directions in which that varies most."""
    theirs = LlamaConfig.from_pretrained(base)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=theirs.vocab_size,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=theirs.max_position_embeddings,
            rms_norm_eps=theirs.rms_norm_eps,
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=theirs.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    tensors = [load_file(shard) for shard in sorted(base.glob("*.safetensors"))]
    embedding = next(
        part["model.embed_tokens.weight"] for part in tensors if "model.embed_tokens.weight" in part
    )
    left, sizes, _ = torch.linalg.svd(embedding.float(), full_matrices=False)
    cut = left[:, :128] * sizes[:128]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(cut * 0.05 / cut.std())
    return model


def train(model: LlamaForCausalLM, learned: list[Row], held: list[Row], steps: int) -> None:
    """AdamW, a short warm-up, a cosine down to nothing; a line every 100 steps."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    began, stream = time.monotonic(), blocks_of(learned)
    for step in range(steps):
        share = min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimiser.param_groups[0]["lr"] = RATE * share
        loss, _ = judged(model, [next(stream) for _ in range(BLOCKS)])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99 or step == steps - 1:
            with torch.no_grad():
                unseen = blocks_of(held)
                lost, right = judged(model, [next(unseen) for _ in range(24)])
            took = f"{time.monotonic() - began:.0f} s"
            print(
                f"step {step + 1}: loss {loss:.3f}, held out {lost:.3f}, right {right:.3f}, {took}",
                flush=True,
            )


def blocks_of(rows: list[Row]) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled rows one behind the other, cut to blocks: tokens, and which of them the base wrote."""
    dice = np.random.default_rng(0)
    while True:
        order = [rows[number] for number in dice.permutation(len(rows))]
        tokens = torch.from_numpy(np.concatenate([row.tokens for row in order])).long()
        wrote = torch.from_numpy(np.concatenate([row.learned for row in order]))
        yield from zip(tokens.split(LENGTH)[:-1], wrote.split(LENGTH)[:-1])


def judged(model: LlamaForCausalLM, batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
    """Cross-entropy of what the base wrote, and the share of it that the model would have written too."""
    tokens, wrote = (torch.stack(parts) for parts in zip(*batch))
    hidden = model.model(tokens[:, :-1]).last_hidden_state[wrote[:, 1:]]
    logits, wanted = model.lm_head(hidden), tokens[:, 1:][wrote[:, 1:]]
    return torch.nn.functional.cross_entropy(logits, wanted), (
        logits.argmax(-1) == wanted
    ).float().mean().item()


if __name__ == "__main__":
    main()
