"""What the demo's base is taught: plans and points of numbered lists, direct answers, pieces of general text.

Asks in the product's own prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specsot.core.skeleton import PlanRules, read_plan
from specsot.params import Message
from specsot_lab.train.rows import Row, row_of, useful
from specsot_lab.train.text_files import items_in
from specsot_master.prompts import Prompts
from specsot_master.text import Text

LENGTH, BEGIN, END = 640, 0, 2
PIECES, PIECE = 4000, 1024  # how many, and of how many tokens
SAMPLED = 16  # one list of so many
TOPICS = (
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
RECIPES = (
    "How do I make {}?",
    "Give me a recipe for {}.",
    "What is a good recipe for {}?",
    "What are the steps to cook {}?",
    "List the steps for making {}.",
)
POLITE = ("Please answer: {}", "{} Answer with a numbered list.")  # for questions of neither form
NEVER = "Can you describe {} to me?"  # a phrasing that is only measured
LISTS = ("outline", "list)", "recipes", "cooking")  # parts of the names of sources whose lists are planned
FEWEST, MOST = 2, 12  # points of a plan; longer lists are answered directly
LINE = re.compile(r"\d+\. +(.+?)(?:: (.+))?$")
TITLE = 60  # characters of a line's part before a colon that can be its title
# The title of a line without one: its first words, but for these at their end.
OPENING = re.compile(r"(?:[^\s,.;:(]+ ?){1,6}")
LOOSE = re.compile(r"(?: (?:a|an|the|to|and|or|of|in|for|with|on|at|by|if|is|are|as|before|[-–—]))+$")

Points = Sequence[tuple[str, str | None]]  # title, and what is written under it where that is known


class Lessons:
    """Rows in the prompts in which the product will ask.

    folder: a base's. data: JSON lines with `instruction`, `input`, `output` and `source`. Raises ModelError
    for a line that cannot be read.
    """

    def __init__(self, folder: Path, data: Path) -> None:
        self._text = Text(folder)
        self._prompts = Prompts(folder, self._text)
        self._items: list[dict[str, Any]] = [item for item in items_in(data) if isinstance(item, dict)]
        outlines = [item["output"] for item in self._items if _is_outline(item)]
        self._known = {title: text for output in outlines for title, text in _outlined(output) if text}

    def learned(self) -> list[Row]:
        """Lists as they were asked and in more phrasings; direct answers half in the plan's turn."""
        dice, rows = random.Random(0), list[Row]()
        for group, item in enumerate(self._items):
            question, points = _question(item), self._points(item)
            if not points:
                rows.append(self._direct(question, item["output"], group, dice.random() < 0.5))
            for each in dict.fromkeys((question, *phrased(question, dice)) if points else ()):
                rows += self._planned(each, points, group)
        return list(useful(rows, LENGTH))

    def sample(self, *, outlines: bool, phrasing: str | None = None) -> list[Row]:
        """Plans and points of some lists that have all their points' texts. phrasing: None: as asked."""
        rows: list[Row] = []
        for group, item in list(enumerate(self._items))[::SAMPLED]:
            question, points = _question(item), self._points(item)
            topic = question if phrasing is None else _topic(question, TOPICS)
            if topic and _is_outline(item) == outlines and _whole(points):
                rows += self._planned((phrasing or "{}").format(topic), points, group)
        return list(useful(rows, LENGTH))

    def topics(self) -> list[str]:
        """The questions that are answered with a plan whose points all have a text, by the alphabet."""
        whole = {_question(item) for item in self._items if _whole(self._points(item))}
        return sorted(question for question in whole if question[0].isalpha() and "\n" not in question)

    def pieces(self, texts: Path) -> list[Row]:
        """A random choice of general text's pieces. texts: JSON lines with `text`."""
        told = (item["text"] for item in items_in(texts) if isinstance(item, dict))
        found = [piece for text in told for piece in _cut(self._text.encode_bare(text))]
        random.Random(0).shuffle(found)
        return [row_of((((BEGIN,), False), (piece, True)), -1) for piece in found[:PIECES]]

    def _points(self, item: dict[str, Any]) -> Points:
        """Empty: no list that is planned. An outline of titles alone takes their texts from the others."""
        if _is_outline(item):
            return [(title, text or self._known.get(title)) for title, text in _outlined(item["output"])]
        points = _listed(item["output"]) if any(name in item["source"] for name in LISTS) else ()
        return points if FEWEST <= len(points) <= MOST else ()

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


def phrased(question: str, dice: random.Random) -> list[str]:
    """The question in other words: three of its own kind's, or two polite ones."""
    for forms in (TOPICS, RECIPES):
        if topic := _topic(question, forms):
            return [form.format(topic) for form in dice.sample(forms, 3)]
    return [form.format(question) for form in POLITE]


def _topic(question: str, forms: Iterable[str]) -> str | None:
    """What stands where the forms have braces."""
    shapes = (re.escape(form).replace(r"\{\}", "(.+)") for form in forms)
    return next((found[1] for shape in shapes if (found := re.fullmatch(shape, question))), None)


def _question(item: dict[str, Any]) -> str:
    return "\n".join(filter(None, (item["instruction"], item["input"])))


def _whole(points: Points) -> bool:
    return bool(points) and all(text for _, text in points)


def _is_outline(item: dict[str, Any]) -> bool:
    return "outline" in item["source"]


def _outlined(output: str) -> Iterator[tuple[str, str | None]]:
    """Title and text of each line "1. Title: text" or "1. Title"."""
    for line in _numbered(output):
        yield line[1].strip(), line[2]


def _listed(output: str) -> list[tuple[str, str]]:
    """Of lines that need not have titles: the first words then are. Ingredients before the list: a point."""
    before = re.split(r"^1\. ", output, maxsplit=1, flags=re.MULTILINE)[0]
    _, found, ingredients = before.partition("Ingredients")
    points = [("Ingredients", ingredients.partition("Directions")[0].strip(" :*#\n"))] if found else []
    for line in _numbered(output):
        head, text = line[1].strip(), line[2]
        if text and len(head) <= TITLE:
            points.append((head, text))
        elif opening := OPENING.match(whole := f"{head}: {text}" if text else head):
            points.append((LOOSE.sub("", opening[0].strip()), whole))
    return points


def _numbered(output: str) -> Iterator[re.Match[str]]:
    """The numbered lines; one that goes on over several is one."""
    for line in re.split(r"\n(?=\d+\. )", output):
        if found := LINE.match(line.partition("\n\n")[0].replace("\n", " ").strip()):
            yield found


def _cut(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """Whole pieces; what is left over is not taken."""
    for first in range(0, len(tokens) - PIECE + 2, PIECE - 1):
        yield tokens[first : first + PIECE - 1]
