"""Aspects of a question: the words on which its sampled direct answers agree, and how many of them an answer
has.

The measure was fixed before anything was measured with it:

* A term is a word of three letters or more, in lower case and in the singular (Harman 1991). The measure is
  made for languages that put spaces between words.
* An aspect is a term that at least two of the sampled answers have and the question does not have. A term
  that is an aspect of more than one question in eight counts as too common ("the", "important"), and is no
  aspect of any question. So no list of stop words is needed, but some 16 questions are.
* Coverage is the fraction of a question's aspects that an answer has. It rewards breadth, and does not see
  order, truth or style. Aspects come from direct answers, so coverage favours direct answers.
* The control has the plan's own headings over the points of another question of the same category. It must
  have a lower coverage than the planned answer; where it does not, the measure says nothing.
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

# Sampled answers. A term is an aspect if at least this many of a question's samples have the term. Fixed
# before the first measurement.
MIN_AGREEING_SAMPLES = 2
# A term that is an aspect of more than 1 / COMMON_TERM_DIVISOR of the questions is dropped as too common.
# Fixed before the first measurement.
COMMON_TERM_DIVISOR = 8
# Letters. Shorter words are no terms. Fixed before the first measurement.
MIN_TERM_LETTERS = 3
# Draws. Number of resampled means of a bootstrap interval. Untuned.
BOOTSTRAP_DRAWS = 10_000
# Fraction. Share of the resampled means that lie inside a bootstrap interval.
INTERVAL_MASS = 0.95

# The distinct terms of a text, see `terms_of`.
Terms = frozenset[str]
# Lower and upper end of a bootstrap interval.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    """An answer that was requested with mode "sot".

    text: The whole text of the answer. It is a direct answer if there are no points.
    headings: The title of each point, in order; empty if the model planned nothing.
    bodies: The text below each heading, as many as there are headings.
    """

    text: str
    headings: tuple[str, ...] = ()
    bodies: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts of the answer that are cut separately: each point with its heading, or the whole
        text if there are no points.
        """
        return tuple(map("{}\n{}".format, self.headings, self.bodies)) or (self.text,)


def singular(word: str) -> str:
    """Return the singular of a word by the S-stemmer of Harman (1991), which applies the first of its three
    rules whose ending the word has. Return the word itself if it has none of the endings, or is an exception.

        "berries" -> "berry", "trees" -> "trees", "houses" -> "house", "cats" -> "cat", "glass" -> "glass"

    word: One word in lower case.

    The exceptions are "eies" and "aies", "aes", "ees" and "oes", "us" and "ss". A word that is an exception
    of a rule is not tried with the next one.
    """
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else f"{word[:-3]}y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word[:-1] if word.endswith("s") and not word.endswith(("us", "ss")) else word


def terms_of(text: str) -> Terms:
    """Return the terms of a text: its words that consist of at least MIN_TERM_LETTERS letters, in lower case
    and in the singular. Return an empty set for a text without such words.

    text: Any text.
    """
    return frozenset(
        singular(word) for word in words_of(text) if len(word) >= MIN_TERM_LETTERS and word.isalpha()
    )


def aspects_of(questions: Mapping[str, str], samples: Mapping[str, Sequence[str]]) -> dict[str, Terms]:
    """Return the aspects of every question by the question's name. A question on whose answers no terms agree
    has an empty set.

    questions: The words of each question, by its name.
    samples: The texts of each question's sampled direct answers, by the same names.

    A term is dropped if it is an agreed term of more than 1 / COMMON_TERM_DIVISOR of the questions. Raises
    KeyError for a question without an entry in `samples`.
    """
    agreed_terms = {
        name: _agreed_terms(samples[name]) - terms_of(question) for name, question in questions.items()
    }
    term_counts = Counter(term for terms in agreed_terms.values() for term in terms)
    common = {term for term, count in term_counts.items() if count * COMMON_TERM_DIVISOR > len(questions)}
    return {name: terms - common for name, terms in agreed_terms.items()}


def _agreed_terms(texts: Sequence[str]) -> Terms:
    """Return the terms that at least MIN_AGREEING_SAMPLES of the texts have; an empty set for fewer texts.

    texts: The sampled answers to one question.
    """
    count = Counter(term for text in texts for term in terms_of(text))
    return frozenset(term for term, times in count.items() if times >= MIN_AGREEING_SAMPLES)


def coverage(parts: Sequence[str], aspects: Terms) -> float:
    """Return the fraction of a question's aspects that an answer has, 0 to 1.

    parts: The texts that make up the answer.
    aspects: The aspects of the question; at least one, because an empty set would divide by zero.
    """
    return len(aspects & terms_of("\n".join(parts))) / len(aspects)


def length_of(parts: Sequence[str]) -> int:
    """Return the number of words of all parts together, separated by white space; 0 without parts.

    parts: The texts that make up an answer.
    """
    return sum(len(part.split()) for part in parts)


def cut_to_words(parts: Sequence[str], words: int) -> list[str]:
    """Return the parts, shortened so that together they have at most a number of words. The words are shared
    evenly, and what a short part does not use goes to the longer parts.

        parts of 1 and 5 words, words 4 -> 1 and 3 words

    parts: The texts that make up an answer. Their white space becomes single spaces.
    words: Maximum number of words of all parts together. At 0 every part becomes empty.

    The order of the parts is kept. No parts give an empty list.
    """
    words_of_parts = [part.split() for part in parts]
    shares = [0] * len(parts)
    words_left = words
    for num_done, index in enumerate(sorted(range(len(parts)), key=lambda index: len(words_of_parts[index]))):
        shares[index] = min(len(words_of_parts[index]), words_left // (len(parts) - num_done))
        words_left -= shares[index]
    return [" ".join(part[:share]) for part, share in zip(words_of_parts, shares)]


def shuffled_controls(
    answers: Mapping[str, PlannedAnswer], categories: Mapping[str, str], seed: int = 0
) -> dict[str, PlannedAnswer]:
    """Return the control of each answer that has points, by name: the headings of the answer over the bodies
    of the next answer in a random ring of its category.

    Answers that are alone in their category form one ring together. An answer without points has no control,
    nor has an answer that is the only member of its ring.

    answers: The planned answers, by the name of their question.
    categories: The category of each question, by the same names.
    seed: Seed of the order of the rings.

    Equal arguments give equal controls. An answer with points that has no category raises KeyError.
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
    """Return an answer that has the headings of one answer over the bodies of another.

        headings [H1 H2 H3], bodies [x y] -> H1 x, H2 y, H3 x

    answer: The answer whose headings are kept; as many bodies are used as it has headings.
    bodies: The bodies to put below the headings, at least one; repeated from the first if there are too few,
        and cut if there are too many.
    """
    borrowed = tuple(bodies[index % len(bodies)] for index in range(len(answer.headings)))
    return PlannedAnswer("\n".join(borrowed), answer.headings, borrowed)


def interval_of(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Interval:
    """Return the 95 % interval of the (weighted) mean over questions, by the percentile bootstrap (Efron
    1979).

    values: One figure for each question, at least one.
    weights: The weight of each question's figure, in the same order. None: all questions weigh the same.
    seed: Seed of the draws, so that equal figures give equal intervals.

    The ends are the 2.5 % and the 97.5 % quantiles of BOOTSTRAP_DRAWS means of questions drawn with
    replacement. A single value gives an interval of width 0.
    """
    draws = np.random.default_rng(seed).integers(len(values), size=(BOOTSTRAP_DRAWS, len(values)))
    weight_array = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    means = (np.asarray(values) * weight_array)[draws].sum(axis=1) / weight_array[draws].sum(axis=1)
    low, high = np.quantile(means, ((1 - INTERVAL_MASS) / 2, (1 + INTERVAL_MASS) / 2))
    return float(low), float(high)


def repetition(text: str, size: int = 4) -> float:
    """Return the fraction of a text's n-grams of words that occur earlier in the text (seq-rep-4 of Welleck
    et al. 2019). Return 0.0 for a text with fewer than `size` words.

    text: Any text.
    size: Number of words in an n-gram.

    A text that never repeats a gram has 0.0.
    """
    words = words_of(text)
    grams = [tuple(words[index : index + size]) for index in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def count_distinct(titles: Sequence[str]) -> int:
    """Return the number of titles that do not repeat an earlier title, compared without case and punctuation.

    titles: The titles of one plan; 0 is returned if there are none.
    """
    return len({tuple(words_of(title)) for title in titles})


def copied_titles(titles: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return those titles whose words appear in one of the sources, next to each other and in the same order;
    an empty list if no title is copied.

    titles: The titles of one plan.
    sources: The texts that a title may be copied from: the question, and the instructions of the prompt.
    """
    source_texts = [f" {' '.join(words_of(source))} " for source in sources]
    return [
        title
        for title in titles
        if any(f" {' '.join(words_of(title))} " in source for source in source_texts)
    ]


def listed_titles(titles: Sequence[str], question: str) -> list[str]:
    """Return those titles that the question itself names as members of a list, such as "pros and cons"; an
    empty list if there are none. The question asks for these titles, so they are points rather than copies.

    titles: The titles of one plan.
    question: The words of the question.
    """
    stems = Stems(question, ())
    return [title for title in copied_titles(titles, (question,)) if is_listed(stems.of(title), stems)]


def mean_overlap(bodies: Sequence[str]) -> float | None:
    """Return the mean ROUGE-L over all pairs of an answer's points, 0 to 1. Return None if the answer has
    fewer than two points.

    bodies: The text of each point.
    """
    pairs = list(combinations(bodies, 2))
    return fmean(rouge_l(first, [second]) for first, second in pairs) if pairs else None


# Figures of one question, category or run by name, as they are written to JSON.
Row = dict[str, Any]
# Category of the row that sums up all questions.
ALL_CATEGORIES = "all"
# Questions. A category with fewer questions gets no verdict, since a bootstrap over so few says nothing.
# Untuned.
MIN_CATEGORY_QUESTIONS = 5


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question with all of its answers.

    name: Name of the question, unique in a run: its task and its id.
    category: The category under which the question is summed up.
    question: The words of the question.
    direct: Text of the greedy direct answer.
    planned: The greedy answer with mode "sot".
    samples: Texts of the direct answers that were sampled with a temperature.
    """

    name: str
    category: str
    question: str
    direct: str
    planned: PlannedAnswer
    samples: tuple[str, ...]


def measure(questions: Sequence[AskedQuestion]) -> list[Row]:
    """Return one row for each question that has aspects; questions without aspects are left out.

    Of a row, "even" holds the coverages [direct, planned] after both answers were cut to the words of the
    shorter one, a planned answer point by point. "shuffled" is the coverage of the control, or None if there
    is no control.

    questions: All questions of the run. Aspects are terms that are rare among the questions, so some 16
        questions are needed.

    The keys are those of `_row`, and the rows have the order of the questions. Controls are made from the
    planned answers of all questions, also of those without aspects.
    """
    aspects = aspects_of(
        {question.name: question.question for question in questions},
        {question.name: question.samples for question in questions},
    )
    control = shuffled_controls(
        {question.name: question.planned for question in questions},
        {question.name: question.category for question in questions},
    )
    return [
        _row(question, aspects[question.name], control.get(question.name))
        for question in questions
        if aspects[question.name]
    ]


def _row(question: AskedQuestion, aspects: Terms, control: PlannedAnswer | None) -> Row:
    """Return the row of one question: its name, counts, and the coverage of its answers.

    question: The question with its answers.
    aspects: The aspects of the question, at least one.
    control: The shuffled answer of `shuffled_controls`. None: the row's "shuffled" is None.

    The keys are "id", "category", "aspects" and "points" (counts), "words" and "repetition" (each [direct,
    planned]), "direct" and "sot" (the coverages), "even" (the coverages at equal words, [direct, planned]),
    and "shuffled".
    """
    direct, planned = (question.direct,), question.planned.parts
    words = [length_of(direct), length_of(planned)]
    even = [coverage(cut_to_words(parts, min(words)), aspects) for parts in (direct, planned)]
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
    """Return one row for each category, in the order in which the categories first occur, and last a row for
    all questions together.

    rows: The rows of `measure`, at least one.

    The last row's category is ALL_CATEGORIES.
    """
    names = list(dict.fromkeys(row["category"] for row in rows))
    groups = [(name, [row for row in rows if row["category"] == name]) for name in names]
    return [_category(name, category_rows) for name, category_rows in (*groups, (ALL_CATEGORIES, list(rows)))]


def _category(name: str, rows: Sequence[Row]) -> Row:
    """Return the row that sums up one category.

    name: Name of the category.
    rows: The rows of the category's questions, at least one.

    The means are over questions. "gain" is the mean coverage of planned answers minus that of direct ones,
    "interval" its 95 % interval; "even_gain" and "even_interval" are the same at equal words;
    "control_interval" is that of planned answers minus their controls. "planned" is the fraction of answers
    with two points or more, "wins" is [questions with a positive gain, questions with a negative one], "more"
    is the mode that covers more, see `_preferred`, or "few" for fewer than MIN_CATEGORY_QUESTIONS questions.
    "shuffled" and "control_interval" are None if no question has a control.
    """
    gains = [row["sot"] - row["direct"] for row in rows]
    even_gains = [row["even"][1] - row["even"][0] for row in rows]
    control_gains = [row["sot"] - row["shuffled"] for row in rows if row["shuffled"] is not None]
    gain_interval = interval_of(gains)
    return {
        "category": name,
        "questions": len(rows),
        "planned": fmean(row["points"] >= 2 for row in rows),
        "aspects": fmean(row["aspects"] for row in rows),
        "direct": fmean(row["direct"] for row in rows),
        "sot": fmean(row["sot"] for row in rows),
        "gain": fmean(gains),
        "interval": gain_interval,
        "wins": [sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)],
        "even_gain": fmean(even_gains),
        "even_interval": interval_of(even_gains),
        "shuffled": fmean(row["shuffled"] for row in rows if row["shuffled"] is not None)
        if control_gains
        else None,
        "control_interval": interval_of(control_gains) if control_gains else None,
        "words": [fmean(row["words"][side] for row in rows) for side in (0, 1)],
        "repetition": [fmean(row["repetition"][side] for row in rows) for side in (0, 1)],
        "more": _preferred(gain_interval) if len(rows) >= MIN_CATEGORY_QUESTIONS else "few",
    }


def _preferred(gain_interval: tuple[float, float]) -> str:
    """Return the mode that covers more aspects: "sot" or "direct"; or "unclear" if the interval includes 0.

    gain_interval: The interval of the planned answers' coverage minus that of the direct answers.
    """
    return "sot" if gain_interval[0] > 0 else "direct" if gain_interval[1] < 0 else "unclear"


def plans_of(questions: Sequence[AskedQuestion], instruction_texts: Sequence[str]) -> Row:
    """Return the figures of all plans together. If no answer has a plan of two points, only the counts
    "questions" and "plans" are returned.

    questions: All questions with their answers.
    instruction_texts: The texts of the prompt that asks for a plan. A title that is copied from them counts
        as copied, as does a title from the question.

    "copied" leaves out titles that the question itself lists, which count as "listed"; both, and "distinct",
    are fractions of all titles. "overlapping" is the number of answers whose points overlap by 0.4 or more.
    The entries of titles name only questions that have such titles; "most_overlapping" has at most five
    (name, overlap).
    """
    plans = [question for question in questions if len(question.planned.headings) >= 2]
    titles = [title for question in plans for title in question.planned.headings]
    listed_by_question = {
        question.name: listed_titles(question.planned.headings, question.question) for question in plans
    }
    copied_by_question = {
        question.name: copied_titles(question.planned.headings, (question.question, *instruction_texts))
        for question in plans
    }
    stolen_by_question = {
        name: [title for title in overlap_values if title not in listed_by_question[name]]
        for name, overlap_values in copied_by_question.items()
    }
    overlaps = [(question.name, mean_overlap(question.planned.bodies)) for question in plans]
    overlap_values = [share for _, share in overlaps if share is not None]
    if not plans:
        return {"questions": len(questions), "plans": 0}
    return {
        "questions": len(questions),
        "plans": len(plans),
        "points": len(titles) / len(plans),
        "distinct": sum(count_distinct(question.planned.headings) for question in plans) / len(titles),
        "copied": sum(map(len, stolen_by_question.values())) / len(titles),
        "listed": sum(map(len, listed_by_question.values())) / len(titles),
        "overlap": fmean(overlap_values),
        "overlapping": sum(share >= 0.4 for share in overlap_values),
        "copied_titles": {name: titles for name, titles in stolen_by_question.items() if titles},
        "listed_titles": {name: titles for name, titles in listed_by_question.items() if titles},
        "repeated_titles": {
            question.name: list(question.planned.headings)
            for question in plans
            if count_distinct(question.planned.headings) < len(question.planned.headings)
        },
        "most_overlapping": sorted(overlaps, key=lambda entry: -(entry[1] or 0))[:5],
    }


def lines_of(rows: Sequence[Row], plans: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page: the table by category, the result of the control, and the figures of the
    plans.

    rows: The rows of `by_category`; the last one is that of all questions.
    plans: The figures of `plans_of`.

    Without a control, a line says that nothing could be shuffled. The figures of plans are left out if there
    are none. The lines do not end with newlines.
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
    """Return the figures of the plans as the end of a line of text.

    plans: The figures of `plans_of`, of at least one plan.
    """
    return (
        f", {plans['points']:.1f} points; distinct titles {plans['distinct']:.1%}, "
        f"copied {plans['copied']:.1%}, listed by the question {plans['listed']:.1%}; "
        f"overlap of points (ROUGE-L) {plans['overlap']:.2f}, 0.4 or more in {plans['overlapping']}"
    )


def _interval_text(interval: tuple[float, float]) -> str:
    """Return an interval as text, such as "+0.010 .. +0.042".

    interval: The lower and the upper end.
    """
    return f"{interval[0]:+.3f} .. {interval[1]:+.3f}"


def _interval_column(heading: str, key: str) -> Column:
    """Return a column of the table that shows intervals.

    heading: Heading of the column.
    key: Name of the row's entry that holds the interval.
    """
    return Column(heading, lambda row: _interval_text(row[key]))


def _pair_column(heading: str, key: str, number_format: str) -> Column:
    """Return a column of the table that shows two figures, such as "12 / 4".

    heading: Heading of the column.
    key: Name of the row's entry that holds the two figures.
    number_format: Format of each figure, such as ".0f".
    """
    return Column(heading, lambda row: " / ".join(format(value, number_format) for value in row[key]))


# Columns of the table of aspects by category.
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
