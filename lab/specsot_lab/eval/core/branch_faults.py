"""Faults of the branches of planned answers, counted. They are the measures by which a form of words is
chosen.

Every fault is the fraction of branches that have it. Words are runs of letters and digits in lower case, and
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
SHARED_RUN_WORDS = 4  # Words of a run that another branch must have in full. Untuned.
# Faults that one broken branch counts as. A branch that copies the list, or speaks of its own form or of
# another subject, could not be sent to a client, whereas one that restates the question is only dull. Chosen
# by reading the answers of SmolLM2 and Qwen2.5-Coder-1.5B: with this weight, the sums order the forms as a
# reader does.
BROKEN_FAULTS = 2.0
STEM_LETTERS = 5  # Letters of a word that must be the same for "Exercising" to speak of "exercises". Untuned.
MIN_TITLE_WORDS = 2  # Of another point's title, before its words count as a mention of that point. Untuned.

# A word: one character in Han script, or a run of letters and digits.
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
# Words that a question shares with any answer, in the languages that the product asks in.
_STOP_LINES = (
    "a an the of to is are was were in and or for on with by it its s that this be can as at from your you",
    "how do does what which why i me my some good should one explain describe give tell compare between",
    "write list der die das den dem und ist sind ein eine einen wie welche was warum hat kann ich man mein",
    "meine es zu von bei beim im für mir el la los las de del un una y o que qué cuáles cuál son cómo puedo",
    "mi en para por al se con sus 的 了 是 有 哪 些 什 么 怎 样 如 何 一 下 和 请 我 吗 在 与",
)
# The words of `_STOP_LINES` as a set.
_STOP = frozenset(word for line in _STOP_LINES for word in line.split())
# The beginning of a line that is an item of a list, numbered or with a bullet.
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
# The end of a sentence: its punctuation, quotes and brackets included.
_SENTENCE = re.compile(r"[.!?…][\"')\]*”’]*(?=\s|$)|[。！？]")


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A question, and what the model wrote for the points of its plan.

    question: The words of the question.
    titles: The titles of the plan's points.
    texts: The text that was written below each title, in the order of the titles.
    """

    question: str
    titles: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BranchFaults:
    """How many faults the branches of some plans have. Except for the first two figures and the last one,
    each figure is the fraction of the branches that have this fault.
    """

    # Number of branches that were counted.
    branches: int
    # Mean number of words in a branch.
    words: float
    # Branches whose first OPENING_WORDS words are also those of another branch of the same plan.
    shared_openings: float
    # Branches whose first RESTATING_WORDS words say the question again.
    restated: float
    # Runs of SHARED_RUN_WORDS words that another branch of the same plan has, too, as a fraction of all runs.
    shared_grams: float
    # Branches whose text is a list, or contains one.
    lists: float
    # Branches whose text names another point of the plan by its whole title.
    other_points: float
    # Branches whose text speaks of its sentences, or numbers them.
    own_form: float
    # Branches whose text has fewer than half of the words of its own title.
    off_title: float
    # Branches whose text has fewer than two sentences, where two or three were asked for.
    short: float

    # Mean number of faults of a branch, by which forms are compared. A branch that shares its opening and
    # restates the question starts the answer over once, and a branch that holds a list of the titles copies
    # the plan once. Faults that break a branch count as BROKEN_FAULTS. The fraction of shared runs is added.
    total: float


def words_of(text: str) -> list[str]:
    """Return the words of a text in order: "Sleep well, 睡眠" -> ["sleep", "well", "睡", "眠"].

    text: Any text. The result is an empty list if it has no words.
    """
    words: list[str] = _WORD.findall(text.lower())
    return words


def measure(plans: Iterable[WrittenPlan]) -> BranchFaults:
    """Return the faults of all branches of these plans; every figure is 0 if there are no branches.

    plans: The plans as they were written.

    "total" is the mean number of faults of a branch plus the fraction of shared runs. Runs are compared only
    within one plan.
    """
    rows = [row for plan in plans for row in _rows_of(plan)]
    shared_grams = sum(row["shared_runs"] for row in rows) / max(sum(row["runs"] for row in rows), 1)

    def mean_figure(name: str) -> float:
        """Return the mean of one figure over all branches; 0.0 if there are none.

        name: Name of the figure in a row of `_rows_of`.
        """
        return fmean(row[name] for row in rows) if rows else 0.0

    return BranchFaults(
        branches=len(rows),
        words=mean_figure("words"),
        shared_openings=mean_figure("shared_openings"),
        restated=mean_figure("restated"),
        shared_grams=shared_grams,
        lists=mean_figure("lists"),
        other_points=mean_figure("other_points"),
        own_form=mean_figure("own_form"),
        off_title=mean_figure("off_title"),
        short=mean_figure("short"),
        total=mean_figure("faults") + shared_grams,
    )


def choose_form(faults_by_form: Mapping[Form, BranchFaults]) -> Form:
    """Return the form of words with the fewest faults per branch. The default form wins ties.

    faults_by_form: The faults of each form that was measured; at least one of FORMS. Forms that are missing
        are not considered.
    """
    forms = sorted(FORMS, key=lambda form: form != DEFAULT_FORM)
    return min(
        (form for form in forms if form in faults_by_form), key=lambda form: faults_by_form[form].total
    )


def _rows_of(plan: WrittenPlan) -> list[dict[str, float]]:
    """Return one row for each branch of a plan: 0 or 1 for each fault, and the number of words, runs and
    shared runs.

    plan: The plan as it was written.

    "shared_openings" is 0 for a branch without words. "restated" is 0 if the question has only stop words.
    "faults" is their sum: a shared opening or a restated question counts 1 once, "short" counts 1, and a list
    or another point's title (once), an own form, and a text off its title count BROKEN_FAULTS each. A plan
    without texts gives an empty list.
    """
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
                "faults": (shared or restated)
                + short
                + BROKEN_FAULTS * ((lists or named) + own_form + off_title),
            }
        )
    return rows


def _runs(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all runs of SHARED_RUN_WORDS consecutive words; an empty list if there are fewer words.

    words: The words of one branch.
    """
    return [
        tuple(words[start : start + SHARED_RUN_WORDS]) for start in range(len(words) - SHARED_RUN_WORDS + 1)
    ]


def _is_about(title: str, words: Sequence[str]) -> bool:
    """Return True if the words include at least half of the words of a title, whose endings may differ. A
    title that consists of stop words fits any words.

    title: The title of the branch's own point.
    words: The words of the branch.
    """
    title_stems = {word[:STEM_LETTERS] for word in words_of(title) if word not in _STOP}
    return 2 * len(title_stems & {word[:STEM_LETTERS] for word in words}) >= len(title_stems)


def _is_named(title: str, words: Sequence[str]) -> bool:
    """Return True if the words contain all words of a title next to each other. Return False for a title of
    one word, because a single word says nothing of the point.

    title: The title of another point.
    words: The words of the branch.

    Upper and lower case and punctuation do not matter.
    """
    title_words = words_of(title)
    size = len(title_words)
    starts = range(len(words) - size + 1)
    return size >= MIN_TITLE_WORDS and any(
        list(words[start : start + size]) == title_words for start in starts
    )
