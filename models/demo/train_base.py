"""Makes `base/`: trains the demo's base further on planned answers to the topics it knows.

Knows nothing of how it will be served but the prompts, which are the product's own. Rows are JSON lines with
`instruction`, `input`, `output` and `source`. Those whose source calls them outlines hold a numbered list of
"Title: sentences": they become plans and points, each asked in several phrasings; all others direct answers:

    python models/demo/train_base.py instruct.jsonl.zst models/demo/base better --seconds 270 --device cuda
"""

from __future__ import annotations

import random
import re
import shutil
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from specsot.params import Message
from specsot.skeleton import PlanRules, read_plan
from specsot_app.train.reading import items_in
from specsot_app.train.rows import Row, batches, pad, row_of, useful
from specsot_master.prompts import Prompts
from specsot_master.text import Text

LENGTH, BATCH_TOKENS, RATE, WARMUP, EVERY = 640, 65536, 0.02, 50, 100
ADAM = 0.15  # its rate, as a share of Muon's
END = 2
FORMS = (
    "Give an overview of {}.",
    "Tell me about {}.",
    "Explain {}.",
    "What should I know about {}?",
    "What are the main points about {}?",
    "Describe the key ideas of {} in a numbered list.",
    "Teach me about {} step by step.",
    "Outline the topic of {} and explain each point.",
    "Summarize {}.",
    "What is {}?",
    "I want to learn about {}.",
    "Write a skeleton (short numbered plan, no details) for an answer that explains {}.",
)
NEVER = "Can you describe {} to me?"  # a phrasing that is only measured
SHAPES = [re.compile(re.escape(form).replace(r"\{\}", "(.+)")) for form in FORMS]
LINE = re.compile(r"\d+\. (.+?)(?:: (.+))?$")

Points = Sequence[tuple[str, str | None]]  # title, and what is written under it where that is known


def main() -> None:
    parser = ArgumentParser(description="Train the demo's base further on the topics it knows.")
    for name in ("data", "start", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    lessons = Lessons(given.start, given.data)
    rows, asked, anew = lessons.learned(), lessons.sample("{asked}"), lessons.sample(NEVER)
    model = LlamaForCausalLM.from_pretrained(given.start, dtype=torch.float32).to(given.device)
    for stage in ("before", "after"):
        if stage == "after":
            train(model, rows, given.seconds)
            model.bfloat16()
        print(
            f"{stage}: right as asked {right(model, asked):.4f}, in a new phrasing {right(model, anew):.4f}"
        )
    model.save_pretrained(given.output, max_shard_size="15MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "specsot.json", "generation_config.json"):
        shutil.copy(given.start / name, given.output / name)


class Lessons:
    """Rows in the prompts in which the product will ask."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._text = Text(folder)
        self._prompts = Prompts(folder, self._text)
        self._items: list[dict[str, Any]] = [item for item in items_in(data) if isinstance(item, dict)]
        lists = (item["output"] for item in self._items if is_outline(item))
        self._known = {title: text for output in lists for title, text in lines_of(output) if text}

    def learned(self) -> list[Row]:
        """Outlines as they were asked and in three more phrasings; the others half in the plan's turn."""
        dice, rows = random.Random(0), list[Row]()
        for group, item in enumerate(self._items):
            question = "\n".join(filter(None, (item["instruction"], item["input"])))
            if not is_outline(item):
                rows.append(self._direct(question, item["output"], group, dice.random() < 0.5))
                continue
            topic = topic_of(question)
            more = [form.format(topic) for form in dice.sample(FORMS, 3)] if topic else []
            for each in dict.fromkeys((question, *more)):
                rows += self._planned(each, self._points(item), group)
        return list(useful(rows, LENGTH))

    def sample(self, phrasing: str) -> list[Row]:
        """Plans and points of every sixteenth row that has all its points' texts."""
        rows: list[Row] = []
        for group, item in enumerate(self._items):
            topic = topic_of(item["instruction"])
            if group % 16 or topic is None or not is_outline(item):
                continue
            points = self._points(item)
            if all(text for _, text in points):
                rows += self._planned(phrasing.format(topic, asked=item["instruction"]), points, group)
        return list(useful(rows, LENGTH))

    def _points(self, item: dict[str, Any]) -> Points:
        """An outline of titles alone takes their texts from the others."""
        return [(title, text or self._known.get(title)) for title, text in lines_of(item["output"])]

    def _direct(self, question: str, answer: str, group: int, planning: bool) -> Row:
        messages = (Message("user", question),)
        if planning:
            skeleton = self._prompts.plan(messages, PlanRules()).skeleton
            return self._row(skeleton.tokens, f"[DIRECT]\n{answer}\n[END]", group)
        return self._row(self._prompts.chat(messages), answer, group)

    def _planned(self, question: str, points: Points, group: int) -> Iterator[Row]:
        lines = (
            f"{number}.<{self._length(text)}><None>[-]{title}\n"
            for number, (title, text) in enumerate(points, 1)
        )
        plan = f"[PLAN]\n{''.join(lines)}[END]"
        turn, read = self._prompts.plan((Message("user", question),), PlanRules()), read_plan(plan) or ()
        yield self._row(turn.skeleton.tokens, plan, group)
        for point, (_, text) in zip(read, points):
            if text:
                yield self._row(turn.branch(point, read, [], point.length).tokens, text, group)

    def _length(self, text: str | None) -> int:
        """Tokens, in tens."""
        return min(-(-len(self._text.encode_bare(text)) // 10) * 10, 200) if text else 30

    def _row(self, prompt: Sequence[int], answer: str, group: int) -> Row:
        return row_of(((prompt, False), ((*self._text.encode_bare(answer), END), True)), group)


def is_outline(item: dict[str, Any]) -> bool:
    return "outline" in item["source"]


def lines_of(output: str) -> Iterator[tuple[str, str | None]]:
    """Title and text of each line of a numbered list."""
    for line in re.split(r"\n(?=\d+\. )", output):
        if found := LINE.match(line.replace("\n", " ").strip()):
            yield found[1].strip(), found[2]


def topic_of(question: str) -> str | None:
    return next((found[1] for shape in SHAPES if (found := shape.fullmatch(question))), None)


def train(model: LlamaForCausalLM, rows: list[Row], seconds: float) -> None:
    """Muon for matrices, AdamW for the rest; a short warm-up, and over the second half down to nothing."""
    matrices = [value for name, value in model.named_parameters() if value.dim() == 2 and "embed" not in name]
    rest = [value for name, value in model.named_parameters() if value.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0)
    adam = torch.optim.AdamW(rest, lr=RATE * ADAM, betas=(0.9, 0.95), weight_decay=0.0)
    began, losses = time.monotonic(), list[Tensor]()
    for step, batch in enumerate(endless(rows)):
        left = 1 - (time.monotonic() - began) / seconds
        if left <= 0:
            break
        share = min((step + 1) / WARMUP, 1.0, 2 * left)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = RATE * share, RATE * ADAM * share
        losses.append(learn(model, batch, (muon, adam)))
        if len(losses) == EVERY:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.3f}", flush=True)
            losses.clear()


def learn(model: LlamaForCausalLM, batch: list[Row], optimisers: Sequence[torch.optim.Optimizer]) -> Tensor:
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type != "cpu"):
        logits, wanted = judged(model, batch)
        loss = cross_entropy(logits.float(), wanted)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return loss.detach()


@torch.no_grad()
def right(model: LlamaForCausalLM, rows: list[Row]) -> float:
    """The share of an answer's tokens that the model would have written behind those before."""
    hits = [
        logits.argmax(-1) == wanted
        for numbers in batches(rows, BATCH_TOKENS // 2, 0, 0)
        for logits, wanted in (judged(model, [rows[number] for number in numbers]),)
    ]
    return torch.cat(hits).float().mean().item()


def endless(rows: list[Row]) -> Iterator[list[Row]]:
    for epoch in count():
        for numbers in batches(rows, BATCH_TOKENS, 0, epoch):
            yield [rows[number] for number in numbers]


def judged(model: LlamaForCausalLM, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Logits where an answer's token follows, and that token."""
    tokens, learned = (torch.from_numpy(part).to(model.device) for part in pad(rows))
    hidden = model.model(tokens[:, :-1].long(), use_cache=False).last_hidden_state[learned[:, 1:]]
    return model.lm_head(hidden), tokens[:, 1:][learned[:, 1:]].long()


if __name__ == "__main__":
    main()
