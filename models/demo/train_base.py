"""Makes `base/`: trains the demo's base further on planned answers to what it knows.

Questions are JSON lines with `instruction`, `input`,
`output` and `source`; texts, JSON lines with `text`, keep the language it had:

    python models/demo/train_base.py instruct.jsonl.zst text.jsonl.zst models/demo/base better --device cuda
"""

from __future__ import annotations

import shutil
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import torch
from lessons import NEVER, Lessons
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from specsot_lab.train.rows import Row, batches, endless, pad

BATCH_TOKENS, TEXT_TOKENS, RATE, WARMUP, EVERY = 65536, 8192, 0.02, 50, 100
ADAM = 0.15  # its rate, as a share of Muon's
HELD_OUT = 64  # pieces of text that are only measured


def main() -> None:
    parser = ArgumentParser(description="Train the demo's base further on what it knows.")
    for name in ("data", "texts", "start", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--share", type=float, default=0.25, help="what general text is of the loss")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    lessons = Lessons(given.start, given.data)
    rows, texts = lessons.learned(), lessons.pieces(given.texts)
    samples = {
        "outlines as asked": lessons.sample(outlines=True),
        "outlines in a new phrasing": lessons.sample(outlines=True, phrasing=NEVER),
        "other lists as asked": lessons.sample(outlines=False),
        "unseen text": texts[:HELD_OUT],
    }
    model = LlamaForCausalLM.from_pretrained(given.start, dtype=torch.float32).to(given.device)
    tell("before", model, samples)
    train(model, rows, texts[HELD_OUT:], given.share, given.seconds)
    tell("after", model.bfloat16(), samples)
    model.save_pretrained(given.output, max_shard_size="15MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "specsot.json", "generation_config.json"):
        shutil.copy(given.start / name, given.output / name)
    (given.output / "topics.txt").write_text("\n".join([*lessons.topics(), ""]), encoding="utf-8")


def train(model: LlamaForCausalLM, rows: list[Row], texts: list[Row], share: float, seconds: float) -> None:
    """Muon for matrices, AdamW for the rest; a short warm-up, and over the second half down to nothing."""
    matrices = [value for name, value in model.named_parameters() if value.dim() == 2 and "embed" not in name]
    rest = [value for name, value in model.named_parameters() if value.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0)
    adam = torch.optim.AdamW(rest, lr=RATE * ADAM, betas=(0.9, 0.95), weight_decay=0.0)
    began, losses = time.monotonic(), list[Tensor]()
    both = zip(endless(rows, BATCH_TOKENS, 0), endless(texts, TEXT_TOKENS, 0))
    for step, (planned, text) in enumerate(both, 1):
        left = 1 - (time.monotonic() - began) / seconds
        if left <= 0:
            break
        rate = RATE * min(step / WARMUP, 1.0, 2 * left)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = rate, rate * ADAM
        losses.append(learn(model, ((planned, 1 - share), (text, share)), (muon, adam)))
        if len(losses) == EVERY:
            print(f"step {step}: losses {torch.stack(losses).mean(0).tolist()}", flush=True)
            losses.clear()


def learn(
    model: LlamaForCausalLM,
    parts: Sequence[tuple[list[Row], float]],
    optimisers: Sequence[torch.optim.Optimizer],
) -> Tensor:
    """One step on batches, each with its weight. Returns their losses."""
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for batch, weight in parts:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type != "cpu"):
            logits, wanted = judged(model, batch)
            loss = cross_entropy(logits.float(), wanted)
        (loss * weight).backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return torch.stack(losses)


@torch.no_grad()
def tell(when: str, model: LlamaForCausalLM, samples: dict[str, list[Row]]) -> None:
    """The share of an answer's tokens that the model would have written behind those before, and its loss."""
    for name, rows in samples.items():
        parts = [
            (logits.argmax(-1) == wanted, cross_entropy(logits.float(), wanted, reduction="none"))
            for numbers in batches(rows, BATCH_TOKENS // 2, 0, 0)
            for logits, wanted in (judged(model, [rows[number] for number in numbers]),)
        ]
        hits, losses = (torch.cat(each).float().mean().item() for each in zip(*parts))
        print(f"{when}, {name}: right {hits:.4f}, loss {losses:.4f}", flush=True)


def judged(model: LlamaForCausalLM, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Logits where an answer's token follows, and that token."""
    tokens, learned = (torch.from_numpy(part).to(model.device) for part in pad(rows))
    hidden = model.model(tokens[:, :-1].long(), use_cache=False).last_hidden_state[learned[:, 1:]]
    return model.lm_head(hidden), tokens[:, 1:][learned[:, 1:]].long()


if __name__ == "__main__":
    main()
