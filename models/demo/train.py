"""Makes `base/`: a Llama of eight thin layers that knows a few lists by heart, on one CPU core.

Questions are JSON lines with `instruction`, `input`, `output` and `source`; `start` is a model of the same
tokens whose embedding and layers it begins with (the others add nothing at first). Twice:

    python models/demo/train.py instruct.jsonl.zst models/demo/{base,small} tiny --seconds 210
    python models/demo/train.py instruct.jsonl.zst models/demo/{base,small} tiny --seconds 180 --go-on
"""

from __future__ import annotations

import random
import re
import shutil
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from specsot.core.skeleton import PlanRules, read_plan
from specsot.params import Message
from specsot_lab.train.rows import Row, endless_batches, pad, row_of
from specsot_lab.train.text_files import items_in
from specsot_master.prompts import Prompts
from specsot_master.text import Text

KNOWN = (
    "Internal Structure of the Heart",
    "Stages of Sleep",
    "Photosynthesis",
    "Banana Pancakes",
    "Tabouleh",
)
OTHERS, TALK = 24, 16  # how many more lists, and short answers of no list
LONGEST, TEXT, ALONE, END = 448, 56, 76, 2  # tokens of a row, and of a point; the end token
BATCH_TOKENS, RATE, WARMUP, ADAM = 2048, 0.02, 20, 0.15  # ADAM: its rate, as a share of Muon's
FORMS = (
    "Explain {}.",
    "Give an overview of {}.",
    "Tell me about {}.",
    "What are the main points about {}?",
    "Outline the topic of {} and explain each point.",
)
RECIPES = ("How do I make {}?", "Give me a recipe for {}.", "List the steps for making {}.")
ASKED = re.compile(
    r"(?:Explain|Give an overview of|Tell me about|What are the main points about|Outline the topic of"
    r"|What should I know about|What is a good recipe for|List the steps for making|How do I make)"
    r" (.+?)(?: and explain each point)?[.?]"
)
DULL = re.compile(
    r"choice|blank|answer|review|question|exercise|thinking|matching|summary|key |true/false|spotlight|about"
    r"|closer|quiz|check|cfa|example|^the$|offensive",
    re.I,
)
# The outline has but two points; this is of the same book's section "Dreams".
DREAMS = [
    (
        "Dreams",
        "Dreams and their associated meanings vary across different cultures and periods of time. "
        "By the late 19th century, Austrian psychiatrist Sigmund Freud had become convinced that dreams "
        "represented an opportunity to gain access to the unconscious.",
    )
]
LINE = re.compile(r"^\d+\. +([^:\n]{3,60}): (.+)$", re.M)
STEP = re.compile(r"^\d+\. +((?:[^\s,.;:(]+ ?){1,4})(.*)$", re.M)

Points = Sequence[tuple[str, str]]


class TrainingBatches:
    """Rows in the prompts in which the product will ask."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._text = Text(folder)
        self._prompts = Prompts(folder, self._text)
        items = [item for item in items_in(data) if isinstance(item, dict)]
        self.lists = dict(self._chosen(items))
        short = [
            item
            for item in items
            if "chatterbot" in item["source"] and re.match(r"(?:What|Which|Who) \w.*\?$", item["instruction"])
        ]
        self.talk = random.Random(0).sample([i for i in short if len(i["output"]) < 120], TALK)

    def questions(self) -> list[str]:
        return [form.format(topic) for topic in self.lists for form in forms_of(topic, self.lists[topic])]

    def rows(self) -> list[Row]:
        rows = [self._row(self._chat(item["instruction"]), item["output"], 0) for item in self.talk]
        for group, (topic, points) in enumerate(self.lists.items(), 1):
            whole = "\n".join(f"{number}. {title}: {text}" for number, (title, text) in enumerate(points, 1))
            for place, form in enumerate(forms_of(topic, points)):
                planned = list(self._planned(form.format(topic), points, group))
                rows += planned if place == 0 else [planned[0], planned[1 + place % len(points)]]
            rows.append(self._row(self._chat(form.format(topic)), whole, group))
        return [row.truncated(LONGEST) for row in rows]

    def _chosen(self, items: list[dict[str, Any]]) -> Iterator[tuple[str, Points]]:
        found: dict[str, Points] = {}
        for item in items:
            asked = ASKED.fullmatch(item["instruction"])
            if asked and len(asked[1]) < 45 and not item["input"]:
                points = self._points(item)
                if 2 <= len(points) <= 6 and len(points) > len(found.get(asked[1], ())):
                    found[asked[1]] = points
        for topic in KNOWN:
            yield topic, [*found[topic], *(DREAMS if topic == "Stages of Sleep" else ())]
        outlines = sorted(
            topic
            for topic in found
            if topic not in KNOWN and not DULL.search(topic) and 3 <= len(found[topic]) <= 5
        )
        for topic in random.Random(1).sample(outlines, OTHERS):
            yield topic, found[topic]

    def _points(self, item: dict[str, Any]) -> Points:
        """Titles and short texts; of a recipe's steps the first words are the titles."""
        recipe = any(name in item["source"] for name in ("recipes", "cooking"))
        lines = STEP.findall(item["output"]) if recipe else LINE.findall(item["output"])
        told = [(one.strip(), (one + two if recipe else two).strip()) for one, two in lines]
        short = [(title, self._cut(text)) for title, text in dict(told).items() if not DULL.search(title)]
        return [] if any(text is None for _, text in short) else [(one, two) for one, two in short if two]

    def _cut(self, text: str) -> str | None:
        """Its first sentences, as many as are short together; None: the first is too long."""
        kept = ""
        for sentence in re.split(r"(?<=[.!?”]) (?=[A-Z])", text):
            if len(self._text.encode_prompt(f"{kept} {sentence}")) > (TEXT if kept else ALONE):
                break
            kept = f"{kept} {sentence}".strip()
        return kept or None

    def _chat(self, question: str) -> tuple[int, ...]:
        return self._prompts.chat((Message("user", question),))

    def _planned(self, question: str, points: Points, group: int) -> Iterator[Row]:
        lines = (f"{n}.<{self._length(text)}><None>[-]{title}\n" for n, (title, text) in enumerate(points, 1))
        plan = f"[PLAN]\n{''.join(lines)}[END]"
        turn, read = self._prompts.plan((Message("user", question),), PlanRules()), read_plan(plan) or ()
        yield self._row(turn.skeleton.tokens, plan, group)
        for point, (_, text) in zip(read, points, strict=True):
            yield self._row(turn.branch(point, read, [], point.length).tokens, text, group)

    def _length(self, text: str) -> int:
        """Tokens, in tens."""
        return -(-len(self._text.encode_prompt(text)) // 10) * 10

    def _row(self, prompt: Sequence[int], answer: str, group: int) -> Row:
        return row_of(((prompt, False), ((*self._text.encode_prompt(answer), END), True)), group)


def forms_of(topic: str, points: Points) -> tuple[str, ...]:
    """How a topic is asked for: the known ones in more phrasings."""
    if topic in ("Banana Pancakes", "Tabouleh"):
        return RECIPES
    return FORMS if topic in KNOWN else (FORMS[len(points) % 2], FORMS[2])


def deeper(theirs: LlamaForCausalLM, layers: int, places: Sequence[int]) -> LlamaForCausalLM:
    """Says what `theirs` says: its layers at these places, and between them some that add nothing yet."""
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**{**theirs.config.to_dict(), **shape, "layer_types": None}))
    model.model.embed_tokens.weight.data.copy_(theirs.model.embed_tokens.weight)
    model.model.norm.weight.data.copy_(theirs.model.norm.weight)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    for mine, layer in zip(places, theirs.model.layers, strict=True):
        known = layer.state_dict()
        for name, value in model.model.layers[mine].state_dict().items():
            value[tuple(slice(0, size) for size in known[name].shape)] = known[name]
    return model


def train(model: LlamaForCausalLM, rows: list[Row], seconds: float, settle: bool) -> None:
    """Muon for matrices, AdamW for the rest; a short warm-up. settle: the rate falls to nothing."""
    matrices = [value for name, value in model.named_parameters() if value.dim() == 2 and "embed" not in name]
    rest = [value for name, value in model.named_parameters() if value.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0)
    adam = torch.optim.AdamW(rest, lr=RATE * ADAM, betas=(0.9, 0.95), weight_decay=0.0)
    began, losses = time.monotonic(), list[float]()
    for step, batch in enumerate(endless_batches(rows, BATCH_TOKENS, 0), 1):
        gone = (time.monotonic() - began) / seconds
        if gone >= 1:
            break
        rate = RATE * min(step / WARMUP, 1.0, 1.4 * (1 - gone) if settle else 1.0)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = rate, rate * ADAM
        loss, _ = judged(model, batch)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}, {gone:.0%}: loss {sum(losses[-20:]) / 20:.3f}", flush=True)


def judged(model: LlamaForCausalLM, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Loss where an answer's token follows, and whether each would have been written."""
    tokens, learned = (torch.from_numpy(part) for part in pad(rows))
    hidden = model.model(tokens[:, :-1].long(), use_cache=False).last_hidden_state[learned[:, 1:]]
    logits, wanted = model.lm_head(hidden).float(), tokens[:, 1:][learned[:, 1:]].long()
    return cross_entropy(logits, wanted), logits.argmax(-1) == wanted


def main() -> None:
    parser = ArgumentParser(description="Train the tests' small base.")
    for name in ("data", "words", "start", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--go-on", action="store_true", help="from `output`, not from `start`")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this thin are slower on two
    feature_batches = TrainingBatches(given.words, given.data)
    rows = feature_batches.rows()
    print(f"{len(rows)} rows, {sum(len(row.tokens) for row in rows)} tokens", flush=True)
    known = LlamaForCausalLM.from_pretrained(
        given.output if given.go_on else given.start, dtype=torch.float32
    )
    model = known if given.go_on else deeper(known, 8, (0, 7))
    train(model, rows, given.seconds, given.go_on)
    model.bfloat16()
    model.float()
    with torch.no_grad():
        right = torch.cat([judged(model, [row])[1] for row in rows[::3]])
    print(f"right {right.float().mean():.4f}", flush=True)
    model.bfloat16().save_pretrained(given.output, max_shard_size="3MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "specsot.json", "generation_config.json"):
        shutil.copy(given.words / name, given.output / name)
    (given.output / "topics.txt").write_text("\n".join([*feature_batches.questions(), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
