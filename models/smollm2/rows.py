"""The rows that the head learned from: what SmolLM2 asks itself, and what it answers. For a GPU.

    python models/smollm2/rows.py MODEL HEAD --data asked.jsonl --answers chats.jsonl --held prompts.jsonl
    specsot train --model MODEL --output HEAD --start OLD_HEAD --steps 6000 --batch-tokens 32768 \
        --length 512 --learning-rate 2e-3 --held-out 0.004 --device cuda --dtype bf16

A chat model that is given its template up to where a user's turn begins makes up a question; at temperature
0.85 they are of all the kinds that it was tuned on. It answers them greedily, is asked once more, and writes
plans and their points in the prompts it has in service. No question has eight words in a row with one of
those that a head is measured on (`--held`).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from specsot.model.decoder import Decoder
from specsot.model.fingerprint import fingerprint
from specsot.model.resolving import resolve_model
from specsot.params import Message
from specsot_lab.train.answers import Writer, answer_all
from specsot_lab.train.rows import Row, row_of, save
from specsot_lab.train.settings import AnswerOptions
from specsot_lab.train.text_files import read_questions, rows_of
from specsot_master.prompts import Prompts
from specsot_master.text import Text

# Every third question begins with one of these; the others as the model likes.
STARTS = """Write a Python function|Write a function|def |Solve|A store|A farmer|If|How many|How much
Calculate|Explain|What is|What are|Why|How do I|How can I|Describe|Compare|Write a story|Write a poem
Write an email|Compose|Imagine|Pretend|You are|Act as|Give me|List|Summarize|Rewrite|Translate|Edit
Extract|Classify|Can you|Could you|Please|Tell me|I need|I want|My|In|Design|Create|Develop|Draft
Suggest|Which|Who|Is it|Does|Should|Discuss|Analyze|Evaluate|Plan|Outline|Find|Identify|Complete|Given
Suppose|The following|Help me"""
MADE_UP, GIVEN, AGAIN, PLANNED = 44_000, 14_000, 9_000, 4_000  # questions of each kind, at most
TEMPERATURE, TOGETHER, SEED, GRAM = 0.85, 2048, 20261123, 8
PLACE = "QQQQ"  # stands for a question in the template


class Warm:
    """A decoder of whose logits the argmax is a draw from their softmax at a temperature."""

    def __init__(self, inner: Decoder, temperature: float) -> None:
        self._inner, self._temperature = inner, temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._inner.logits(hidden).float() / self._temperature
        return logits - torch.log(torch.empty_like(logits).exponential_())


class SelfTalk:
    """The model in both roles."""

    def __init__(self, model: Path, device: str) -> None:
        self.text, self._dice = Text(model), Random(SEED)
        decoder = Decoder.load(model, None, torch.bfloat16, device)
        self.answers = Writer(decoder, self.text.end_ids, TOGETHER)
        self._warm: Any = Writer(Warm(decoder, TEMPERATURE), self.text.end_ids, TOGETHER)
        self._ends = set(self.text.end_ids)

    def questions(self, count: int) -> Iterator[str]:
        """Those that ended."""
        starts = STARTS.replace("\n", "|").split("|")
        begun = [self._dice.choice(starts) if number % 3 == 0 else "" for number in range(count)]
        prompts = [self.text.encode(self._before_a_question(()) + start) for start in begun]
        for start, written in zip(begun, self._warm.write(prompts, 160)):
            if written and written[-1] in self._ends:
                yield (start + self._read(written)).strip()

    def ask_again(self, stories: Sequence[tuple[Message, ...]]) -> list[str | None]:
        """What the user of each story says next; None: nothing that ends."""
        prompts = [self.text.encode(self._before_a_question(story)) for story in stories]
        said = self._warm.write(prompts, 64)
        return [self._read(ids).strip() if ids and ids[-1] in self._ends else None for ids in said]

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.text.encode(self.text.render(messages)))

    def has_ended(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self._ends

    def _read(self, ids: Sequence[int]) -> str:
        return self.text.decode([one for one in ids if one not in self._ends])

    def answer_text(self, ids: Sequence[int]) -> str:
        return self._read(ids).strip()

    def _before_a_question(self, story: tuple[Message, ...]) -> str:
        whole = self.text.render((*story, Message("user", PLACE)))
        return whole[: whole.rindex(PLACE)]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[str]:
    """Its runs of GRAM words; all of it where it is shorter."""
    said = words(text)
    return {" ".join(said[n : n + GRAM]) for n in range(len(said) - GRAM + 1)} or {" ".join(said)}


def fitting(questions: Iterable[str], held: set[str]) -> list[str]:
    """Neither too short nor too long, each once, none that shares a run of words with what is held out."""
    found: dict[str, str] = {}
    for one in questions:
        plain = 3 <= len(words(one)) <= 140 and len(one) < 900 and "<|" not in one
        if plain and held.isdisjoint(grams(one)):
            found.setdefault(" ".join(words(one)), one)
    return list(found.values())


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    reader.add_argument("model", help="directory or GGUF file")
    reader.add_argument("head", type=Path, help="the folder that `specsot train --output` will be given")
    reader.add_argument("--data", type=Path, nargs="*", default=[], help="questions of others, JSON lines")
    reader.add_argument("--answers", type=Path, nargs="*", default=[], help="conversations that are there")
    reader.add_argument("--held", type=Path, nargs="*", default=[], help="questions to keep away from")
    reader.add_argument("--device", default="cuda")
    given = reader.parse_args()
    model, began, dice = resolve_model(given.model), time.monotonic(), Random(SEED)
    torch.manual_seed(SEED)
    talk, held = SelfTalk(model, given.device), set(chain.from_iterable(map(grams, _read_all(given.held))))

    own = fitting(talk.questions(MADE_UP), held)
    others = [one for one in _read_all(given.data) if one not in set(own)]
    dice.shuffle(others)
    questions = own + fitting(others[:GIVEN], held)
    prompts = [talk.prompt([Message("user", question)]) for question in questions]
    written = talk.answers.write(prompts, 384)
    rows = _rows(prompts, written, range(len(questions)))

    ended = [
        n for n in range(len(own)) if talk.has_ended(written[n]) and len(prompts[n]) + len(written[n]) < 330
    ]
    dice.shuffle(ended)
    stories = [
        (Message("user", questions[n]), Message("assistant", talk.answer_text(written[n])))
        for n in ended[:AGAIN]
    ]
    second = [
        (number, talk.prompt([*story, Message("user", said)]))
        for number, story, said in zip(ended, stories, talk.ask_again(stories))
        if said and len(words(said)) >= 2 and held.isdisjoint(grams(said))
    ]
    again = [prompt for _, prompt in second]
    rows += _rows(again, talk.answers.write(again, 256), [number for number, _ in second])

    short = [n for n, question in enumerate(questions) if len(words(question)) <= 40]
    dice.shuffle(short)
    planned, asking = (
        short[:PLANNED],
        AnswerOptions(0.0, plan_tokens=96, answer_tokens=224, together=TOGETHER),
    )
    plans = answer_all(
        [questions[n] for n in planned], Prompts(model, talk.text), talk.text, talk.answers, asking, _quiet
    )
    rows += [Row(row.tokens, row.learned, planned[row.group]) for row in plans]
    for file in given.answers:
        rows += rows_of(file, talk.text, 512, 1 + max(row.group for row in rows))
    save(rows, given.head / "training" / "rows.npz", {"model": fingerprint(model)})
    learned = sum(int(row.learned.sum()) for row in rows)
    print(f"{len(rows)} rows, {learned} tokens to learn, {time.monotonic() - began:.0f} s")


def _quiet(what: str, done: int, total: int) -> Callable[[int], object]:
    return lambda more: None


def _read_all(files: Sequence[Path]) -> list[str]:
    return [question for file in files for question in read_questions(file, ("{}",))]


def _rows(
    prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]], groups: Iterable[int]
) -> list[Row]:
    return [
        row_of(((prompt, False), (ids, True)), group)
        for prompt, ids, group in zip(prompts, written, groups)
        if ids
    ]


if __name__ == "__main__":
    main()
