"""What is wrong with the branches of planned answers, counted: the measures by which a wording is chosen.

Every fault is the share of branches that have it. Words are runs of letters and digits in lower case, and
single characters in Han script.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specsot_master.core.plans.wording import DEFAULT_FORM, FORMS, Form

OPENING_WORDS = 4  # Words. Two branches that begin with the same ones share an opening. Untuned.
RESTATING_WORDS = 14  # Words of a branch in which the words of the question are looked for. Untuned.
RESTATED_SHARE = 0.6  # Of the question's words; a branch that says as many of them restates it. Untuned.
GRAM = 4  # Words of a run that another branch must have in full. Untuned.
# Faults that a broken branch counts as: it copies the list, speaks of its own form or of another subject, so
# that nobody would send it, where one that restates the question is only dull. By reading the answers of
# SmolLM2 and Qwen2.5-Coder-1.5B, with whose order of the forms the sums then agree.
BROKEN = 2.0
STEM = 5  # Letters of a word that must be the same for "Exercising" to speak of "exercises". Untuned.
LEAST_TITLE_WORDS = 2  # Of another point's title, before its words count as a mention of that point. Untuned.

_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
# Words that a question shares with any answer, in the languages that the product asks in.
_STOP_LINES = (
    "a an the of to is are was were in and or for on with by it its s that this be can as at from your you",
    "how do does what which why i me my some good should one explain describe give tell compare between",
    "write list der die das den dem und ist sind ein eine einen wie welche was warum hat kann ich man mein",
    "meine es zu von bei beim im für mir el la los las de del un una y o que qué cuáles cuál son cómo puedo",
    "mi en para por al se con sus 的 了 是 有 哪 些 什 么 怎 样 如 何 一 下 和 请 我 吗 在 与",
)
_STOP = frozenset(word for line in _STOP_LINES for word in line.split())
_LIST_LINE = re.compile(r"(?m)^\s*(?:\d{1,2}[.)、]|[-*•])\s")
# A branch that writes of its own form: "Erster Satz:", "two sentences", "dos o tres frases", "第一句",
# "Heading: ...".
_OWN_FORM = re.compile(
    r"\b(?:first|second|third)\s+sentence\b|\b(?:one|two|three)(?:\s+or\s+three)?\s+(?:short\s+)?sentences\b|\bshort\s+paragraph\b|"
    r"\b(?:erste[rs]?|zweite[rs]?|dritte[rs]?)\s+satz\b|\b(?:zwei|drei)\s+(?:kurze\s+)?sätze\b|\bkurze[rn]?\s+absatz\b|"
    r"\b(?:primera|segunda|tercera)\s+(?:frase|oración)\b|\b(?:dos|tres)\s+(?:frases|oraciones)\b|\bpárrafo\s+breve\b|"
    r"第[一二三]句|[两三]句话|一小段话|"
    r"\b(?:heading|überschrift|título|(?:point|punkt|punto)\s+\d+)\s*:|\bhere(?:'s|\s+is)\s+the\s+text\b|(?:标题|要点\s*\d*)\s*：",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.!?…][\"')\]*”’]*(?=\s|$)|[。！？]")


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A question, and what was written below each of its plan's titles, in the same order."""

    question: str
    titles: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BranchFaults:
    """Shares of the branches, but for the first two figures."""

    branches: int
    # Mean number of words in a branch.
    words: float
    # The first words are those of another branch of the same plan.
    shared_openings: float
    # The first words say the question again.
    restated: float
    # Runs of four words that another branch of the same plan has, too: a share of all runs.
    shared_grams: float
    # The text is, or holds, a list of its own.
    lists: float
    # The text names another point of the plan by its whole title.
    other_points: float
    # The text speaks of its sentences or numbers them.
    own_form: float
    # The text has fewer than half of the words of its own title.
    off_title: float
    # The text has fewer than two sentences, where two or three were asked for.
    short: float

    # Faults of a branch on average, by which forms are compared. A branch that shares its opening and
    # restates the question starts the answer over once, and one that holds a list of the titles copies the
    # plan once; faults that break a branch count as BROKEN.
    total: float


def words_of(text: str) -> list[str]:
    """Return the words of a text: "Sleep well, 睡眠" is ["sleep", "well", "睡", "眠"]."""
    found: list[str] = _WORD.findall(text.lower())
    return found


def measure(plans: Iterable[WrittenPlan]) -> BranchFaults:
    """Return the faults of all branches of these plans; all are 0 if there are none."""
    rows = [row for plan in plans for row in _rows_of(plan)]
    shared_grams = sum(row["shared_runs"] for row in rows) / max(sum(row["runs"] for row in rows), 1)

    def share(name: str) -> float:
        """Return the mean of one figure over all branches; 0 if there are none."""
        return fmean(row[name] for row in rows) if rows else 0.0

    return BranchFaults(
        branches=len(rows),
        words=share("words"),
        shared_openings=share("shared_openings"),
        restated=share("restated"),
        shared_grams=shared_grams,
        lists=share("lists"),
        other_points=share("other_points"),
        own_form=share("own_form"),
        off_title=share("off_title"),
        short=share("short"),
        total=share("faults") + shared_grams,
    )


def choose_form(faults_by_form: Mapping[Form, BranchFaults]) -> Form:
    """Return the form with the fewest faults per branch; the default form wins ties."""
    order = sorted(FORMS, key=lambda form: form != DEFAULT_FORM)
    return min(
        (form for form in order if form in faults_by_form), key=lambda form: faults_by_form[form].total
    )


def _rows_of(plan: WrittenPlan) -> list[dict[str, float]]:
    """Return what is counted of every branch of one plan."""
    written = [words_of(text) for text in plan.texts]
    openings = Counter(tuple(words[:OPENING_WORDS]) for words in written)
    runs = [_runs(words) for words in written]
    question_words = set(words_of(plan.question)) - _STOP
    rows: list[dict[str, float]] = []
    for index, (text, words) in enumerate(zip(plan.texts, written)):
        runs_elsewhere = set().union(
            *(other for other_index, other in enumerate(runs) if other_index != index)
        )
        other_titles = [title for other_index, title in enumerate(plan.titles) if other_index != index]
        restated_words = question_words & set(words[:RESTATING_WORDS])
        shared = bool(words) and openings[tuple(words[:OPENING_WORDS])] > 1
        restated = bool(question_words) and len(restated_words) >= RESTATED_SHARE * len(question_words)
        lists = _LIST_LINE.search(text) is not None
        named = any(_is_named(title, words) for title in other_titles)
        own_form = _OWN_FORM.search(text) is not None
        off_title = not _is_about(plan.titles[index], words)
        short = len(_SENTENCE.findall(text.strip())) < 2
        rows.append(
            {
                "words": len(words),
                "shared_openings": shared,
                "restated": restated,
                "runs": len(runs[index]),
                "shared_runs": sum(run in runs_elsewhere for run in runs[index]),
                "lists": lists,
                "other_points": named,
                "own_form": own_form,
                "off_title": off_title,
                "short": short,
                "faults": (shared or restated) + short + BROKEN * ((lists or named) + own_form + off_title),
            }
        )
    return rows


def _runs(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all runs of GRAM consecutive words; none for fewer words."""
    return [tuple(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)]


def _is_about(title: str, words: Sequence[str]) -> bool:
    """Return whether the words have at least half of the words of a title, in any form."""
    title_stems = {word[:STEM] for word in words_of(title) if word not in _STOP}
    return 2 * len(title_stems & {word[:STEM] for word in words}) >= len(title_stems)


def _is_named(title: str, words: Sequence[str]) -> bool:
    """Return whether the words contain all words of a title in a row; False for a title of one word, which
    may be any word.
    """
    title_words = words_of(title)
    size = len(title_words)
    ends = range(len(words) - size + 1)
    return size >= LEAST_TITLE_WORDS and any(
        list(words[start : start + size]) == title_words for start in ends
    )
