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
        """Of which each is cut by itself."""
        return tuple(map("{}\n{}".format, self.headings, self.bodies)) or (self.text,)


def singular(word: str) -> str:
    """The S-stemmer of Harman (1991): of its three rules, the first whose ending a word has."""
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else f"{word[:-3]}y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word[:-1] if word.endswith("s") and not word.endswith(("us", "ss")) else word


def terms_of(text: str) -> Terms:
    return frozenset(singular(word) for word in words_of(text) if len(word) >= SHORTEST and word.isalpha())


def aspects_of(questions: Mapping[str, str], samples: Mapping[str, Sequence[str]]) -> dict[str, Terms]:
    """Of every question, by its name. samples: the texts of its sampled direct answers."""
    agreed = {name: _agreed(samples[name]) - terms_of(question) for name, question in questions.items()}
    spread = Counter(term for terms in agreed.values() for term in terms)
    common = {term for term, count in spread.items() if count * COMMON > len(questions)}
    return {name: terms - common for name, terms in agreed.items()}


def _agreed(texts: Sequence[str]) -> Terms:
    count = Counter(term for text in texts for term in terms_of(text))
    return frozenset(term for term, times in count.items() if times >= AGREEING)


def coverage(parts: Sequence[str], aspects: Terms) -> float:
    """Share of the aspects, of which there must be some, that an answer has."""
    return len(aspects & terms_of("\n".join(parts))) / len(aspects)


def length_of(parts: Sequence[str]) -> int:
    return sum(len(part.split()) for part in parts)


def cut(parts: Sequence[str], words: int) -> list[str]:
    """As many words as there may be, shared out evenly: what a short part leaves over is for the others."""
    split = [part.split() for part in parts]
    shares = [0] * len(parts)
    left = words
    for before, place in enumerate(sorted(range(len(parts)), key=lambda place: len(split[place]))):
        shares[place] = min(len(split[place]), left // (len(parts) - before))
        left -= shares[place]
    return [" ".join(part[:share]) for part, share in zip(split, shares)]


def shuffled(
    answers: Mapping[str, PlannedAnswer], categories: Mapping[str, str], seed: int = 0
) -> dict[str, PlannedAnswer]:
    """The control, of every answer that has points: under its own headings those of the next one in a random
    ring of its category, from the first again where there are fewer. Answers that are alone in their category
    form a ring together.
    """
    rings: dict[str, list[str]] = {}
    for name in answers:
        if answers[name].bodies:
            rings.setdefault(categories[name], []).append(name)
    alone = [name for ring in rings.values() if len(ring) == 1 for name in ring]
    found: dict[str, PlannedAnswer] = {}
    for ring in (*rings.values(), alone):
        if len(ring) < 2:
            continue
        order = [ring[place] for place in np.random.default_rng(seed).permutation(len(ring))]
        for name, other in zip(order, (*order[1:], *order[:1])):
            found[name] = _under(answers[name], answers[other].bodies)
    return found


def _under(answer: PlannedAnswer, bodies: Sequence[str]) -> PlannedAnswer:
    borrowed = tuple(bodies[place % len(bodies)] for place in range(len(answer.headings)))
    return PlannedAnswer("\n".join(borrowed), answer.headings, borrowed)


def interval_of(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Interval:
    """Of the (weighted) mean over questions, by the percentile bootstrap (Efron 1979)."""
    drawn = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    heavy = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    means = (np.asarray(values) * heavy)[drawn].sum(axis=1) / heavy[drawn].sum(axis=1)
    low, high = np.quantile(means, ((1 - INSIDE) / 2, (1 + INSIDE) / 2))
    return float(low), float(high)


def repetition(text: str, size: int = 4) -> float:
    """Share of a text's n-grams of words that stand in it before (Welleck et al. 2019, seq-rep-4)."""
    words = words_of(text)
    grams = [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(titles: Sequence[str]) -> int:
    """How many of a plan's titles are no repetition of one before it, whatever their case and punctuation."""
    return len({tuple(words_of(title)) for title in titles})


def copied(titles: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Titles whose words stand in this order in a source: the question, or what the model was told."""
    there = [f" {' '.join(words_of(source))} " for source in sources]
    return [title for title in titles if any(f" {' '.join(words_of(title))} " in source for source in there)]


def listed(titles: Sequence[str], question: str) -> list[str]:
    """Those that the question says and lists beside others ("pros and cons"): it asks for them, so they are
    points and no copies.
    """
    stems = Stems(question, ())
    return [title for title in copied(titles, (question,)) if is_listed(stems.of(title), stems)]


def overlap(bodies: Sequence[str]) -> float | None:
    """ROUGE-L between the points of an answer, the mean over all pairs. None: there is no pair."""
    pairs = list(combinations(bodies, 2))
    return fmean(rouge_l(one, [other]) for one, other in pairs) if pairs else None


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
    """Of every question that has aspects.

    even: both answers cut to the words of the shorter one, a plan's point by point.
    shuffled None: there is no plan whose points could be exchanged.
    """
    aspects = aspects_of(
        {one.name: one.question for one in questions}, {one.name: one.samples for one in questions}
    )
    control = shuffled(
        {one.name: one.planned for one in questions}, {one.name: one.category for one in questions}
    )
    return [_row(one, aspects[one.name], control.get(one.name)) for one in questions if aspects[one.name]]


def _row(one: AskedQuestion, aspects: Terms, control: PlannedAnswer | None) -> Row:
    direct, planned = (one.direct,), one.planned.parts
    words = [length_of(direct), length_of(planned)]
    even = [coverage(cut(parts, min(words)), aspects) for parts in (direct, planned)]
    return {
        "id": one.name,
        "category": one.category,
        "aspects": len(aspects),
        "points": len(one.planned.bodies),
        "words": words,
        "direct": coverage(direct, aspects),
        "sot": coverage(planned, aspects),
        "even": even,
        "shuffled": coverage(control.parts, aspects) if control else None,
        "repetition": [repetition(one.direct), repetition("\n".join(planned))],
    }


def by_category(rows: Sequence[Row]) -> list[Row]:
    """In the order in which they come first, and all together."""
    names = list(dict.fromkeys(row["category"] for row in rows))
    groups = [(name, [row for row in rows if row["category"] == name]) for name in names]
    return [_category(name, found) for name, found in (*groups, (EVERYTHING, list(rows)))]


def _category(name: str, rows: Sequence[Row]) -> Row:
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
        "more": _verdict(found) if len(rows) >= FEWEST else "few",
    }


def _verdict(gain: tuple[float, float]) -> str:
    return "sot" if gain[0] > 0 else "direct" if gain[1] < 0 else "unclear"


def plans_of(questions: Sequence[AskedQuestion], told: Sequence[str]) -> Row:
    """Of all plans together. told: our words, of which no title may be made, beside those of the question."""
    plans = [one for one in questions if len(one.planned.headings) >= 2]
    titles = [title for one in plans for title in one.planned.headings]
    wanted = {one.name: listed(one.planned.headings, one.question) for one in plans}
    said = {one.name: copied(one.planned.headings, (one.question, *told)) for one in plans}
    stolen = {name: [title for title in found if title not in wanted[name]] for name, found in said.items()}
    overlaps = [(one.name, overlap(one.planned.bodies)) for one in plans]
    found = [share for _, share in overlaps if share is not None]
    if not plans:
        return {"questions": len(questions), "plans": 0}
    return {
        "questions": len(questions),
        "plans": len(plans),
        "points": len(titles) / len(plans),
        "distinct": sum(distinct(one.planned.headings) for one in plans) / len(titles),
        "copied": sum(map(len, stolen.values())) / len(titles),
        "listed": sum(map(len, wanted.values())) / len(titles),
        "overlap": fmean(found),
        "overlapping": sum(share >= 0.4 for share in found),
        "copied_titles": {name: titles for name, titles in stolen.items() if titles},
        "listed_titles": {name: titles for name, titles in wanted.items() if titles},
        "repeated_titles": {
            one.name: list(one.planned.headings)
            for one in plans
            if distinct(one.planned.headings) < len(one.planned.headings)
        },
        "most_overlapping": sorted(overlaps, key=lambda told: -(told[1] or 0))[:5],
    }


def lines_of(rows: Sequence[Row], plans: Mapping[str, Any]) -> Iterator[str]:
    """The page: the table, the control's verdict, the plans."""
    yield markdown(COLUMNS, rows)
    yield ""
    whole = rows[-1]
    if whole["control_interval"] is None:
        yield "control: no plan has points, so nothing could be shuffled"
    else:
        loses = whole["control_interval"][0] > 0
        verdict = "it loses, as it must" if loses else "IT DOES NOT LOSE: this measure says nothing here"
        told = _between(whole["control_interval"])
        yield f"control: planned less shuffled, 95 % interval {told}: {verdict}"
    direct, sot = whole["repetition"]
    yield f"repeated 4-grams: direct {direct:.1%}, sot {sot:.1%}"
    yield f"plans: {plans['plans']} of {plans['questions']}" + (_of_plans(plans) if plans["plans"] else "")


def _of_plans(plans: Mapping[str, Any]) -> str:
    return (
        f", {plans['points']:.1f} points; distinct titles {plans['distinct']:.1%}, "
        f"copied {plans['copied']:.1%}, listed by the question {plans['listed']:.1%}; "
        f"overlap of points (ROUGE-L) {plans['overlap']:.2f}, 0.4 or more in {plans['overlapping']}"
    )


def _between(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3f} .. {interval[1]:+.3f}"


def _interval(heading: str, key: str) -> Column:
    return Column(heading, lambda row: _between(row[key]))


def _two(heading: str, key: str, shown: str) -> Column:
    return Column(heading, lambda row: " / ".join(format(value, shown) for value in row[key]))


COLUMNS = (
    text("category", "category"),
    figure("n", "questions", 0),
    figure("planned", "planned"),
    figure("aspects", "aspects", 0),
    figure("direct", "direct", 3),
    figure("sot", "sot", 3),
    _interval("sot - direct, 95 %", "interval"),
    _two("won / lost", "wins", "d"),
    _interval("at equal words", "even_interval"),
    figure("shuffled", "shuffled", 3),
    _two("words d / s", "words", ".0f"),
    Column("more", lambda row: str(row["more"])),
)
