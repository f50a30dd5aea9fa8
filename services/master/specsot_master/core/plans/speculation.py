"""One request's plan and direct answer while both are decoded, until it is decided which of them is used.

The decision depends on tokens only: on the plan's, and on those of the direct answer that tell where its
introduction ends (`introduction.py`). It is the same whichever of the two is ready first, with any drafter,
and after any repair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from specsot.core.skeleton import Point
from specsot.params import Ask
from specsot_master.core.plans.answer import FirstSequence
from specsot_master.core.plans.answer_forms import FormReader
from specsot_master.core.plans.guards import MIN_POINTS, are_listed
from specsot_master.core.plans.introduction import Introduction, announced_count, find_introduction
from specsot_master.core.plans.short_answers import ShortAnswer
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.wording import language_of

# Ordinal. Of the plan's sequence while the direct answer has ordinal 0. No branch has so large an ordinal.
PLAN_ORDINAL: Final = 1 << 16
# The reason in `Statistics.decision` if the direct answer has no introduction (see `find_introduction`).
NO_BEGINNING: Final = "the answer does not begin with an introduction"
# The reason if a plan would only stretch the direct answer (see `short_answers`).
SHORT_ANSWER: Final = "the direct answer is short"
# The reason if the plan has fewer points than the question or the introduction asks for, or fewer than
# MIN_POINTS.
TOO_FEW_POINTS: Final = "the plan has too few points"
# The reason if the introduction is in another language than the question, for example because a system
# message asks for answers in German. The plan would not fit, because it is in the language of the question.
OTHER_LANGUAGE: Final = "the answer is in another language than the question"
# The reason if the ring had no room for a plan beside the direct answer when the request was admitted.
NO_ROOM: Final = "the ring had no room for a plan"


class Verdict(Enum):
    """What was decided between a plan and a direct answer: use the plan, use the direct answer, or nothing
    yet.
    """

    # Use the plan.
    PLAN = "plan"
    # Use the direct answer.
    DIRECT = "direct"
    # Nothing is decided yet.
    OPEN = "open"


@dataclass(slots=True)
class Speculation:
    """A plan and a direct answer that are decoded at the same time, with what is known of both until the
    decision.

    skeleton: reads the plan's text.
    question: the text that the client asks; "" if it is not given as text.
    asked: how many points the question asks for, or None.
    things: True if the question asks for several things, such as advice. The introduction is then the first
        sentence alone, because the sentences after it may name things that the points name as well.
    length: tells from the direct answer's tokens whether it is short.
    form: tells from the direct answer's tokens which form it has, from which its usual length follows.
    introduction: what is known of the direct answer's introduction.
    points: the points of the plan that the guards kept, () if there are too few, None while the plan grows.
    cut: True if a limit ended the plan.
    direct_ended: True once the sequence of the direct answer has ended.
    decided: True once the decision was taken.
    """

    skeleton: FirstSequence
    question: str = ""
    asked: int | None = None
    things: bool = False
    length: ShortAnswer = field(default_factory=ShortAnswer)
    form: FormReader = field(default_factory=FormReader)
    introduction: Introduction = field(default_factory=Introduction)
    points: tuple[Point, ...] | None = None
    cut: bool = False
    direct_ended: bool = False
    decided: bool = False
    # The text of the direct answer's first tokens, until the introduction is known.
    _text: str = ""
    # The number of these tokens.
    _tokens: int = 0

    def read_direct(self, pieces: Iterable[TextPiece]) -> None:
        """Add pieces of the direct answer, one token at a time, until its introduction and its form are
        known, and whether the answer is short; later pieces are ignored. `introduction` is updated after each
        piece; pieces without a token count as text only.

        pieces: the next pieces of the direct answer.
        """
        for piece in pieces:
            self.length.read(piece)
            self.form.read(piece)
            if self.introduction.complete:
                continue
            self._text += piece.text
            self._tokens += piece.token is not None
            self.introduction = find_introduction(self._text, self._tokens, one_sentence=self.things)

    def end_direct(self) -> None:
        """Record that the direct answer has ended, which makes its introduction known. An introduction that
        was complete before does not change.
        """
        self.direct_ended = True
        self.length.end()
        self.form.end()
        if not self.introduction.complete:
            self.introduction = find_introduction(self._text, self._tokens, True, self.things)

    @property
    def introduction_text(self) -> str:
        """The introduction, once it is complete; before that, its visible beginning."""
        return self._text[: self.introduction.visible]

    @property
    def verdict(self) -> Verdict:
        """What the tokens so far decide; OPEN as long as they do not decide.

        The direct answer is used if the plan has too few points, if the direct answer has no introduction or
        one in another language than the question, or if it is short. Otherwise the plan is used as soon as
        four things are known: the points, the introduction, the form of the direct answer, and that the
        direct answer is not short.
        """
        known = self.introduction
        unusable = known.complete and (not known.usable or self._is_in_other_language)
        if self.points == () or unusable or self._is_short:
            return Verdict.DIRECT
        if self.points is None or not known.complete or None in (self._is_short, self.form.form):
            return Verdict.OPEN
        return Verdict.DIRECT if self._lacks_points else Verdict.PLAN

    @property
    def _is_short(self) -> bool | None:
        """Whether the direct answer is short, or None if that is not known yet."""
        return self.length.is_short(self.skeleton.written, self.points is not None)

    @property
    def _is_in_other_language(self) -> bool:
        """True if the introduction is clearly in another language than the question. An introduction whose
        language cannot be told, for example because it has no common words, counts as one in the question's
        language.
        """
        asked_in = language_of(self.question)
        return language_of(self.introduction_text, unclear=asked_in) != asked_in

    @property
    def _lacks_points(self) -> bool:
        """True if the plan has fewer points than the question asks for or the introduction promises. If
        neither names a number, True if the plan has fewer than MIN_POINTS, unless its points are just the
        things that the question names.
        """
        promised = max(self.asked or 0, announced_count(self.introduction_text) or 0)
        points = self.points or ()
        if not promised and are_listed(points, self.question, self.introduction_text):
            return False
        return len(points) < (promised or MIN_POINTS)

    @property
    def reason(self) -> str | None:
        """Why the direct answer is used although the plan may be a good one: it has no introduction
        (NO_BEGINNING) or one in another language (OTHER_LANGUAGE), it is short (SHORT_ANSWER), or the plan
        has fewer points than were asked for or promised (TOO_FEW_POINTS). None in all other cases, such as a
        plan without points.
        """
        if self.introduction.complete and not self.introduction.usable:
            return NO_BEGINNING
        if self.introduction.complete and self._is_in_other_language:
            return OTHER_LANGUAGE
        if self._is_short:
            return SHORT_ANSWER
        return TOO_FEW_POINTS if self.points and self._lacks_points else None

    @property
    def named_count(self) -> int | None:
        """The number of points that the introduction promises; without a promise, the number that the
        question asks for. None if neither names a number.
        """
        return announced_count(self.introduction_text) or self.asked

    @property
    def promised_points(self) -> tuple[Point, ...]:
        """The plan's points, no more of them than the introduction promises; () without a plan."""
        points = self.points or ()
        return points[: announced_count(self.introduction_text) or len(points)]


def may_speculate(ask: Ask) -> bool:
    """Return True if this request's plan may be begun together with the direct answer. The mode must be auto,
    and the client must set no least number of tokens.

    It may not if the client asks for a plan, if the text is rewritten or bounded by the clock, or if the
    client wants the logprobs of the prompt, which belong to one sequence.

    ask: what the client asks for.
    """
    alone = (ask.polish, ask.finish_within_s is not None, ask.prompt_logprobs is not None, ask.min_tokens)
    return ask.mode == "auto" and not any(alone)
