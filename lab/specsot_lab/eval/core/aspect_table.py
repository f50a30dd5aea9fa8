"""Aspects of a question: words on which its sampled direct answers agree, and how many of them an answer has.

The measure, fixed before anything was measured with it:

* A term is a word of three letters or more, in lower case, its plural folded (Harman 1991): made for
  languages that put spaces between words.
* An aspect is a term that at least two of the sampled answers have and the question has not. A term that is
  an aspect of more than one question in eight is none of any ("the", "important"). So no list of stop words
  is needed, but some 16 questions are.
* Coverage is the share of a question's aspects that an answer has. It rewards breadth; order, truth and style
  it does not see. Aspects come from direct answers, so it leans towards direct ones.
* The control has the plan's own headings over the points of another question of the same category. It must
  lose against the planned answer; where it does not, the measure says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_lab.eval.scoring import rouge_l, words_of
from specsot_master.core.plans.guards import Stems, is_listed

AGREEING = 2  # sampled answers that must have a term
COMMON = 8  # a term that more than one in so many questions have is no aspect
SHORTEST = 3  # letters of a term
DRAWS = 10_000  # of the bootstrap
INSIDE = 0.95  # of its interval

Terms = frozenset[str]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    """An answer of mode sot: headings and bodies of its points. No points: `text` is a direct answer."""

    text: str
    headings: tuple[str, ...] = ()
    bodies: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts that are cut by themselves: each point with its heading, or the whole direct
        answer.
        """
        return tuple(map("{}\n{}".format, self.headings, self.bodies)) or (self.text,)


def singular(word: str) -> str:
    """Return the singular of a word by the S-stemmer of Harman (1991): the first of its three rules whose
    ending the word has.
    """
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else f"{word[:-3]}y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word[:-1] if word.endswith("s") and not word.endswith(("us", "ss")) else word


def terms_of(text: str) -> Terms:
    """Return the terms of a text: words of at least SHORTEST letters, their plurals folded."""
    return frozenset(singular(word) for word in words_of(text) if len(word) >= SHORTEST and word.isalpha())


def aspects_of(questions: Mapping[str, str], samples: Mapping[str, Sequence[str]]) -> dict[str, Terms]:
    """Return the aspects of every question, by its name.

    questions: texts by name. samples: the texts of each question's sampled direct answers.
    """
    agreed_terms = {
        name: _agreed_terms(samples[name]) - terms_of(question) for name, question in questions.items()
    }
    term_counts = Counter(term for terms in agreed_terms.values() for term in terms)
    common = {term for term, count in term_counts.items() if count * COMMON > len(questions)}
    return {name: terms - common for name, terms in agreed_terms.items()}


def _agreed_terms(texts: Sequence[str]) -> Terms:
    """Return the terms that at least AGREEING of the texts have."""
    count = Counter(term for text in texts for term in terms_of(text))
    return frozenset(term for term, times in count.items() if times >= AGREEING)


def coverage(parts: Sequence[str], aspects: Terms) -> float:
    """Return the fraction of the aspects that an answer has. aspects: at least one."""
    return len(aspects & terms_of("\n".join(parts))) / len(aspects)


def length_of(parts: Sequence[str]) -> int:
    """Return the number of words of all parts."""
    return sum(len(part.split()) for part in parts)


def cut(parts: Sequence[str], words: int) -> list[str]:
    """Return the parts with at most `words` words together, shared out evenly: what a short part leaves over
    is for the others.

    Parts of 1 and 5 words, words 4 -> 1 and 3.
    """
    words_of_parts = [part.split() for part in parts]
    shares = [0] * len(parts)
    words_left = words
    for num_done, index in enumerate(sorted(range(len(parts)), key=lambda index: len(words_of_parts[index]))):
        shares[index] = min(len(words_of_parts[index]), words_left // (len(parts) - num_done))
        words_left -= shares[index]
    return [" ".join(part[:share]) for part, share in zip(words_of_parts, shares)]


def shuffled(
    answers: Mapping[str, PlannedAnswer], categories: Mapping[str, str], seed: int = 0
) -> dict[str, PlannedAnswer]:
    """Return the control of every answer that has points: under its own headings the points of the next
    answer in a random ring of its category.

    Answers that are alone in their category form a ring together; a single one has no control.

    answers, categories: by name. seed: of the order.
    """
    rings: dict[str, list[str]] = {}
    for name in answers:
        if answers[name].bodies:
            rings.setdefault(categories[name], []).append(name)
    single_names = [name for ring in rings.values() if len(ring) == 1 for name in ring]
    controls: dict[str, PlannedAnswer] = {}
    for ring in (*rings.values(), single_names):
        if len(ring) < 2:
            continue
        order = [ring[index] for index in np.random.default_rng(seed).permutation(len(ring))]
        for name, other in zip(order, (*order[1:], *order[:1])):
            controls[name] = _with_other_bodies(answers[name], answers[other].bodies)
    return controls


def _with_other_bodies(answer: PlannedAnswer, bodies: Sequence[str]) -> PlannedAnswer:
    """Return an answer's headings over other bodies, which are repeated from the first if they are fewer."""
    borrowed = tuple(bodies[index % len(bodies)] for index in range(len(answer.headings)))
    return PlannedAnswer("\n".join(borrowed), answer.headings, borrowed)


def interval_of(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Interval:
    """Return the 95 % interval of the (weighted) mean over questions, by the percentile bootstrap (Efron
    1979).

    values: one for each question. weights: None: all equal. seed: of the draws.
    """
    draws = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    weight_array = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    means = (np.asarray(values) * weight_array)[draws].sum(axis=1) / weight_array[draws].sum(axis=1)
    low, high = np.quantile(means, ((1 - INSIDE) / 2, (1 + INSIDE) / 2))
    return float(low), float(high)


def repetition(text: str, size: int = 4) -> float:
    """Return the fraction of a text's n-grams of words that occur earlier in it (Welleck et al. 2019,
    seq-rep-4); 0 for a shorter text.
    """
    words = words_of(text)
    grams = [tuple(words[index : index + size]) for index in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(titles: Sequence[str]) -> int:
    """Return how many of a plan's titles do not repeat an earlier one, whatever their case and
    punctuation.
    """
    return len({tuple(words_of(title)) for title in titles})


def copied(titles: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return the titles whose words are in a source in this order: the question, or what the
    model was told.
    """
    source_texts = [f" {' '.join(words_of(source))} " for source in sources]
    return [
        title
        for title in titles
        if any(f" {' '.join(words_of(title))} " in source for source in source_texts)
    ]


def listed(titles: Sequence[str], question: str) -> list[str]:
    """Return the titles that the question names and lists with others ("pros and cons"): it asks for them, so
    they are points and no copies.
    """
    stems = Stems(question, ())
    return [title for title in copied(titles, (question,)) if is_listed(stems.of(title), stems)]


def overlap(bodies: Sequence[str]) -> float | None:
    """Return the mean ROUGE-L over all pairs of points of an answer; None if there is no pair."""
    pairs = list(combinations(bodies, 2))
    return fmean(rouge_l(first, [second]) for first, second in pairs) if pairs else None


Row = dict[str, Any]
EVERYTHING = "all"
FEWEST = 5  # questions of which a bootstrap says something; not measured


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question with all its answers: greedy direct, planned, and sampled direct ones."""

    name: str
    category: str
    question: str
    direct: str
    planned: PlannedAnswer
    samples: tuple[str, ...]


def measure(questions: Sequence[AskedQuestion]) -> list[Row]:
    """Return a row for every question that has aspects.

    even: both answers cut to the words of the shorter one, a plan's point by point. shuffled None: there is
        no plan whose points could be exchanged.
    """
    aspects = aspects_of(
        {question.name: question.question for question in questions},
        {question.name: question.samples for question in questions},
    )
    control = shuffled(
        {question.name: question.planned for question in questions},
        {question.name: question.category for question in questions},
    )
    return [
        _row(question, aspects[question.name], control.get(question.name))
        for question in questions
        if aspects[question.name]
    ]


def _row(question: AskedQuestion, aspects: Terms, control: PlannedAnswer | None) -> Row:
    """Return the row of one question. aspects: of the question. control: the shuffled answer, or None."""
    direct, planned = (question.direct,), question.planned.parts
    words = [length_of(direct), length_of(planned)]
    even = [coverage(cut(parts, min(words)), aspects) for parts in (direct, planned)]
    return {
        "id": question.name,
        "category": question.category,
        "aspects": len(aspects),
        "points": len(question.planned.bodies),
        "words": words,
        "direct": coverage(direct, aspects),
        "sot": coverage(planned, aspects),
        "even": even,
        "shuffled": coverage(control.parts, aspects) if control else None,
        "repetition": [repetition(question.direct), repetition("\n".join(planned))],
    }


def by_category(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each category, in the order in which they first occur, and one for all together."""
    names = list(dict.fromkeys(row["category"] for row in rows))
    groups = [(name, [row for row in rows if row["category"] == name]) for name in names]
    return [_category(name, found) for name, found in (*groups, (EVERYTHING, list(rows)))]


def _category(name: str, rows: Sequence[Row]) -> Row:
    """Return the row of one category. rows: of its questions, at least one."""
    gains = [row["sot"] - row["direct"] for row in rows]
    even = [row["even"][1] - row["even"][0] for row in rows]
    kept = [row["sot"] - row["shuffled"] for row in rows if row["shuffled"] is not None]
    found = interval_of(gains)
    return {
        "category": name,
        "questions": len(rows),
        "planned": fmean(row["points"] >= 2 for row in rows),
        "aspects": fmean(row["aspects"] for row in rows),
        "direct": fmean(row["direct"] for row in rows),
        "sot": fmean(row["sot"] for row in rows),
        "gain": fmean(gains),
        "interval": found,
        "wins": [sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)],
        "even_gain": fmean(even),
        "even_interval": interval_of(even),
        "shuffled": fmean(row["shuffled"] for row in rows if row["shuffled"] is not None) if kept else None,
        "control_interval": interval_of(kept) if kept else None,
        "words": [fmean(row["words"][side] for row in rows) for side in (0, 1)],
        "repetition": [fmean(row["repetition"][side] for row in rows) for side in (0, 1)],
        "more": _preferred(found) if len(rows) >= FEWEST else "few",
    }


def _preferred(gain: tuple[float, float]) -> str:
    """Return which way covers more by the interval of the gain: "sot", "direct", or "unclear" if it includes
    0.
    """
    return "sot" if gain[0] > 0 else "direct" if gain[1] < 0 else "unclear"


def plans_of(questions: Sequence[AskedQuestion], our_words: Sequence[str]) -> Row:
    """Return the figures of all plans together; only counts if there is no plan.

    questions: with their answers. our_words: words of the prompt, which no title may be made of, in addition
        to those of the question.
    """
    plans = [question for question in questions if len(question.planned.headings) >= 2]
    titles = [title for question in plans for title in question.planned.headings]
    listed_titles = {
        question.name: listed(question.planned.headings, question.question) for question in plans
    }
    copied_titles = {
        question.name: copied(question.planned.headings, (question.question, *our_words))
        for question in plans
    }
    stolen = {
        name: [title for title in found if title not in listed_titles[name]]
        for name, found in copied_titles.items()
    }
    overlaps = [(question.name, overlap(question.planned.bodies)) for question in plans]
    found = [share for _, share in overlaps if share is not None]
    if not plans:
        return {"questions": len(questions), "plans": 0}
    return {
        "questions": len(questions),
        "plans": len(plans),
        "points": len(titles) / len(plans),
        "distinct": sum(distinct(question.planned.headings) for question in plans) / len(titles),
        "copied": sum(map(len, stolen.values())) / len(titles),
        "listed": sum(map(len, listed_titles.values())) / len(titles),
        "overlap": fmean(found),
        "overlapping": sum(share >= 0.4 for share in found),
        "copied_titles": {name: titles for name, titles in stolen.items() if titles},
        "listed_titles": {name: titles for name, titles in listed_titles.items() if titles},
        "repeated_titles": {
            question.name: list(question.planned.headings)
            for question in plans
            if distinct(question.planned.headings) < len(question.planned.headings)
        },
        "most_overlapping": sorted(overlaps, key=lambda our_words: -(our_words[1] or 0))[:5],
    }


def lines_of(rows: Sequence[Row], plans: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page: the table, the control's result, the plans.

    rows: as `by_category` returns them. plans: as `plans_of` returns them.
    """
    yield markdown(COLUMNS, rows)
    yield ""
    total = rows[-1]
    if total["control_interval"] is None:
        yield "control: no plan has points, so nothing could be shuffled"
    else:
        loses = total["control_interval"][0] > 0
        verdict = "it loses, as it must" if loses else "IT DOES NOT LOSE: this measure says nothing here"
        interval_text = _interval_text(total["control_interval"])
        yield f"control: planned less shuffled, 95 % interval {interval_text}: {verdict}"
    direct, sot = total["repetition"]
    yield f"repeated 4-grams: direct {direct:.1%}, sot {sot:.1%}"
    yield f"plans: {plans['plans']} of {plans['questions']}" + (
        _plan_figures(plans) if plans["plans"] else ""
    )


def _plan_figures(plans: Mapping[str, Any]) -> str:
    """Return the figures of the plans in words."""
    return (
        f", {plans['points']:.1f} points; distinct titles {plans['distinct']:.1%}, "
        f"copied {plans['copied']:.1%}, listed by the question {plans['listed']:.1%}; "
        f"overlap of points (ROUGE-L) {plans['overlap']:.2f}, 0.4 or more in {plans['overlapping']}"
    )


def _interval_text(interval: tuple[float, float]) -> str:
    """Return an interval such as "+0.010 .. +0.042"."""
    return f"{interval[0]:+.3f} .. {interval[1]:+.3f}"


def _interval_column(heading: str, key: str) -> Column:
    """Return a column of intervals. heading: of the column. key: of the entry in a row."""
    return Column(heading, lambda row: _interval_text(row[key]))


def _pair_column(heading: str, key: str, number_format: str) -> Column:
    """Return a column of two figures, such as "12 / 4". key: of the entry. number_format: of each figure,
    such as ".0f".
    """
    return Column(heading, lambda row: " / ".join(format(value, number_format) for value in row[key]))


COLUMNS = (
    text("category", "category"),
    figure("n", "questions", 0),
    figure("planned", "planned"),
    figure("aspects", "aspects", 0),
    figure("direct", "direct", 3),
    figure("sot", "sot", 3),
    _interval_column("sot - direct, 95 %", "interval"),
    _pair_column("won / lost", "wins", "d"),
    _interval_column("at equal words", "even_interval"),
    figure("shuffled", "shuffled", 3),
    _pair_column("words d / s", "words", ".0f"),
    Column("more", lambda row: str(row["more"])),
)
