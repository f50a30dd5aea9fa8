"""Usual lengths of direct answers, by the language and kind of the question and the form of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from specsot_master.core.plans.answer_forms import ANSWER_FORMS, AnswerForm
from specsot_master.core.plans.wording import QUESTION_KINDS, Language, QuestionKind

# Answers. A class with fewer has the usual length of a larger class that contains it. Untuned.
MIN_ANSWERS: Final = 5
# Ratio. A planned answer is as long as the direct one if it has from NEAR[0] to NEAR[1] times its length.
# Given by the aim of the feature.
NEAR: Final = (0.8, 1.25)
# Tokens. Usual lengths are multiples of this number. Untuned.
STEP: Final = 10


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """The class and the length of one direct answer.

    language: language of the question.
    kind: what the question asks for.
    form: form of the answer.
    tokens: number of tokens of the answer.
    """

    language: Language
    kind: QuestionKind
    form: AnswerForm
    tokens: int


def count_near(length: int, tokens: Iterable[int]) -> int:
    """Return to how many answers a length is near, see NEAR.

    length: number of tokens that a planned answer would have.
    tokens: numbers of tokens of direct answers.
    """
    return sum(NEAR[0] <= length / one <= NEAR[1] for one in tokens)


def usual_length(tokens: Sequence[int]) -> int:
    """Return the length that is near to most answers, a multiple of STEP. Of several such lengths, the median
    is returned.

        [200, 210, 220, 900] -> 210

    tokens: numbers of tokens of answers, at least one.
    """
    lengths = range(STEP, max(tokens) + 2 * STEP, STEP)
    near = {length: count_near(length, tokens) for length in lengths}
    best = [length for length in lengths if near[length] == max(near.values())]
    return max(round(median(best) / STEP) * STEP, STEP)


def lengths_of(
    answers: Sequence[MeasuredAnswer],
) -> dict[Language, dict[QuestionKind, dict[AnswerForm, int]]]:
    """Return the usual length of every class of the languages that were measured.

    A class with fewer than MIN_ANSWERS answers has the usual length of the answers of the same form in its
    language, or, if they are too few as well, of all answers in its language. A language with fewer than
    MIN_ANSWERS answers is left out.

    answers: the direct answers.
    """
    by_language: dict[Language, list[MeasuredAnswer]] = {}
    for answer in answers:
        by_language.setdefault(answer.language, []).append(answer)
    return {
        language: {
            kind: {form: _length_of(found, kind, form) for form in ANSWER_FORMS} for kind in QUESTION_KINDS
        }
        for language, found in by_language.items()
        if len(found) >= MIN_ANSWERS
    }


def _length_of(answers: Sequence[MeasuredAnswer], kind: QuestionKind, form: AnswerForm) -> int:
    """Return the usual length of one class of one language, or of the smallest class around it that has
    MIN_ANSWERS answers.

    answers: the answers in the language, at least MIN_ANSWERS.
    kind: what the question asks for.
    form: form of the answer.
    """
    same_form = [answer for answer in answers if answer.form == form]
    same = [answer for answer in same_form if answer.kind == kind]
    chosen = next(some for some in (same, same_form, answers) if len(some) >= MIN_ANSWERS)
    return usual_length([answer.tokens for answer in chosen])


def rows_of(
    answers: Sequence[MeasuredAnswer],
    lengths: Mapping[Language, Mapping[QuestionKind, Mapping[AnswerForm, int]]],
) -> list[dict[str, str | int]]:
    """Return one row for each class that has answers: its number of answers, their shortest and longest, the
    usual length, and to how many of the answers that length is near. Classes of languages without usual
    lengths are left out.

    answers: the direct answers.
    lengths: the usual lengths.
    """
    rows: list[dict[str, str | int]] = []
    for language, by_kind in lengths.items():
        for kind, by_form in by_kind.items():
            for form, length in by_form.items():
                found = [a.tokens for a in answers if (a.language, a.kind, a.form) == (language, kind, form)]
                if found:
                    figures = {"answers": len(found), "shortest": min(found), "longest": max(found)}
                    names = {"language": language, "kind": kind, "form": form}
                    rows.append({**names, **figures, "usual": length, "near": count_near(length, found)})
    return rows
