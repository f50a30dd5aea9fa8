"""The router: rules that read a request, and one score by the model, decide whether an answer is planned.

The rules look at the form of a question, not at its subject. A direct answer is the safe way, so a question
is answered directly unless something says that the answer has several parts. The words are English, Chinese,
German and Spanish; rules that depend on no words (limits, code, figures, a long text) hold in every language.

If the rules say nothing, the model gives a score. The score needs no further prompt: the direct answer is
begun with one word, and one pass through the model says whether it would continue as before several things
("Here are") or as before one ("Here is").
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from specsot.core.skeleton import MAX_LIST_POINTS
from specsot.events import TokenLogprobs
from specsot.params import MAX_LOGPROBS, Ask, Message, Mode, Sampling
from specsot_master.core.plans import router_words

# Tokens. The fewest for which mode auto plans an answer: two points of 64. A plan with one point would be a
# direct answer with a detour.
MIN_PLANNED_TOKENS = 128
# Characters. A longer message brings a text to work on, and is no plain question. Untuned.
LONG_TEXT = 1000
# Words, or Chinese characters. A later question of at most so many words refers back if it has a pronoun.
# Untuned.
FOLLOW_UP_WORDS = 12
# Words, or Chinese characters. A later question of at most so many words refers back in any case. Untuned.
FEW_WORDS = 4
# Questions. Bounds the memory of questions that were decided lately: at most 256 KB of text. Untuned.
KNOWN_QUESTIONS: Final = 256


@dataclass(frozen=True, slots=True)
class Decision:
    """What the router decided: whether a request is planned, and why.

    mode: "direct", "sot" for a plan, or "auto" if the model decides: by its score if there is a threshold,
        else by what it writes.
    reason: why, in a few words, as the statistics of the request show it.
    threshold: the lowest score with which the answer is planned, or None if no score is taken.
    """

    mode: Mode
    reason: str
    threshold: float | None = None

    def way(self, planned: bool, direct: bool) -> tuple[Mode, str]:
        """Return what the request became and why, when it is over. A request that was stopped before the
        model had decided is "direct" and "undecided". A plan whose answer became direct after all is
        "direct", with the reason.

        planned: True if the answer has branches, or a plan was forced.
        direct: True if a direct answer was written.
        """
        if planned and not direct:
            return "sot", f"planned: {self.reason}"
        return "direct", f"direct: {self.reason}" if direct else "undecided"


ASKED_FOR = "asked for"
BY_ITSELF = "chosen by the model"
UNDECIDED = "nothing says that the answer has several points"
SEVERAL_POINTS = "the answer has several points"
ONE_CAUSE = "one cause is asked for"
NO_WORDS = "no words"
CODE = "code"
SMALL_TALK = "small talk"
SHORT_FACT = "a short fact"
YES_OR_NO = "a yes-or-no question"
# The keys of `router_words.FORMS` whose forms a system message may ask for in all answers.
INSTRUCTED_FORMS: Final = ("a short answer is wanted", "a form is asked for")

# Matches the empty string between a character of Han script and a Latin letter or figure. The signs + and #
# may end the name of a programming language: with spaces at the matches, "用C#写" becomes "用 C# 写".
_BESIDE_HAN = re.compile(rf"(?<={router_words.HAN})(?=[A-Za-z0-9])|(?<=[A-Za-z0-9+#])(?={router_words.HAN})")


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """The router's prompt after which one token is scored, to learn how the model would begin its answer.

    tokens: the token ids of the prompt.
    several: ids of tokens that continue toward several things.
    one: ids of tokens that continue toward one thing.
    threshold: the lowest score with which the answer is planned; 0.0 plans if several things are at least as
        likely as one.
    """

    tokens: tuple[int, ...]
    several: tuple[int, ...]
    one: tuple[int, ...]
    threshold: float = 0.0


BEGUN = "Here"
SEVERAL = (" are",)
ONE = (" is", "'s")


def scoring(ask: Ask) -> Ask:
    """Return the request's parameters for the sequence that is scored: one token, with default sampling and
    logprobs.

    ask: what the client asks for.
    """
    limits = replace(ask.limits, max_new_tokens=1)
    return replace(ask, sampling=Sampling(), limits=limits, logprobs=MAX_LOGPROBS, ignore_eos=True)


def score_of(told: TokenLogprobs, prompt: ScorePrompt) -> float | None:
    """Return the log of how much likelier the model continues toward several things than toward one. A side
    with several tokens counts with the sum of their probabilities.

    A side that is not among the reported candidates counts as likely as the last of them. Return None if
    neither side is among them.

        several: log(0.6), one: log(0.2) -> log(3) = 1.10
    told: the likeliest tokens after the prompt, with their logprobs.
    prompt: names the tokens of each side.
    """
    chances = {one.token: one.logprob for one in told.top}
    several = _sum_of(chances, prompt.several)
    one = _sum_of(chances, prompt.one)
    if several is None and one is None:
        return None
    least = min(chances.values())
    return (least if several is None else several) - (least if one is None else one)


def _sum_of(chances: Mapping[int, float], tokens: Sequence[int]) -> float | None:
    """Return the log of the tokens' summed probability, or None if no token was reported.

    chances: the logprobs of the reported tokens, by token id.
    tokens: the token ids of one side.
    """
    found = [math.exp(chances[token]) for token in tokens if token in chances]
    return math.log(sum(found)) if found else None


def judge(score: float | None, threshold: float) -> Decision:
    """Return the decision for a score; a direct answer without a score. A score equal to the threshold is
    planned.

    score: what `score_of` returned; None if the model gave no score.
    threshold: the lowest score with which the answer is planned.
    """
    if score is None:
        return Decision("direct", "the model gave no score")
    if score >= threshold:
        return Decision("sot", f"score {score:.2f} >= {threshold:.2f}")
    return Decision("direct", f"score {score:.2f} < {threshold:.2f}")


def judge_by(told: TokenLogprobs | None, prompt: ScorePrompt) -> Decision:
    """Return the decision for the scored token.

    told: its logprobs; None if there are none, then the answer is direct.
    prompt: names the tokens of each side, and the threshold.
    """
    return judge(score_of(told, prompt) if told else None, prompt.threshold)


def decide(ask: Ask, messages: Sequence[Message], taught: bool, threshold: float | None = None) -> Decision:
    """Decide by what can be read in the request, as far as its mode leaves the choice. A mode other than auto
    is the decision itself. Tokens as a prompt and limits below MIN_PLANNED_TOKENS are answered directly.

    The decision is "auto" if the score must decide, or if a model that was trained to plan may choose by
    itself because no rule demands a direct answer.

    ask: what the client asks for.
    messages: the conversation, oldest turn first; empty if the prompt is given in tokens.
    taught: True if the model was trained to plan.
    threshold: the score threshold that was measured for this model; None if none was, so that a question that
        the rules leave open is answered directly.
    """
    if ask.mode != "auto":
        return Decision(ask.mode, ASKED_FOR)
    if ask.tokens:
        return Decision("direct", "the prompt is given in tokens")
    if ask.limits.new_tokens < MIN_PLANNED_TOKENS:
        return Decision("direct", f"max_new_tokens below {MIN_PLANNED_TOKENS}")
    if not taught and (reason := _form_of(ask, messages)):
        return Decision("direct", reason)
    later = any(one.role == "assistant" for one in messages)
    decision = decide_question(messages[-1].content if messages else "", later)
    if taught:
        asked = decision.mode == "sot" or decision.reason in (UNDECIDED, NO_WORDS)
        return Decision("auto", BY_ITSELF) if asked else decision
    if decision.reason == UNDECIDED and threshold is not None:
        return Decision("auto", UNDECIDED, threshold)
    return decision


def _form_of(ask: Ask, messages: Sequence[Message]) -> str | None:
    """Return why this request should not be planned, whatever its question is. Return None if nothing speaks
    against a plan.

    The reasons are offered tools, stop strings, a last message that is not the user's, and a system message
    that asks for short answers or for a form. System messages of more than LONG_TEXT characters are ignored:
    they describe many things, and a form that they mention need not be that of the answers.

    ask: what the client asks for.
    messages: the conversation, at least one message.
    """
    if ask.tools:
        return "tools are offered"
    if ask.stop:
        return "stop strings are given"
    if messages[-1].role != "user":
        return "the last message is not a question"
    instructions = (one.content for one in messages if one.role == "system" and len(one.content) <= LONG_TEXT)
    wanted = (_instructed_form(text) for text in instructions)
    return next((reason for reason in wanted if reason), None)


def _instructed_form(text: str) -> str | None:
    """Return the reason in INSTRUCTED_FORMS that applies to a system message, such as "a short answer is
    wanted" for "Answer in one sentence.". Return None if none does.

    The other forms of `router_words.FORMS` are not looked for: a system message such as "You write poems."
    describes a role, and does not say that every answer is a poem.

    text: the system message.
    """
    parts = _sentences(text)
    return next((name for name in INSTRUCTED_FORMS if _has_form(name, text, parts)), None)


def ends_loops(ask: Ask) -> bool:
    """Return True if a direct answer ends where it repeats itself over and over. Without a question, loops
    are ended.

    Text is not ended that may have to repeat itself: code, which the question asks for, what a form
    describes, what continues a prompt in tokens, and what the question wants repeated. Neither is text that
    has to go on: to its least length, or whatever end tokens come.

    ask: what the client asks for.
    """
    if ask.tokens or ask.form is not None or ask.min_tokens or ask.ignore_eos:
        return False
    question = question_of(ask)
    return not _holds(router_words.REPEATING, question) and decide_question(question).reason != CODE


def question_of(ask: Ask) -> str:
    """Return the text of a request's prompt or last message; "" for a prompt in tokens.

    ask: what the client asks for.
    """
    if ask.prompt is not None:
        return ask.prompt
    return ask.messages[-1].content if ask.messages else ""


def decide_question(question: str, later: bool = False) -> Decision:
    """Decide by the words of a question. The decision is never "auto". A text of more than LONG_TEXT
    characters is answered directly, as is one without words.

    question: the text that the client asks.
    later: True if the conversation already has an answer.
    """
    text = question.strip()
    if len(text) <= LONG_TEXT:
        # One lookup, because threads that encode long prompts use this memory, too.
        if not later and (known := _known.get(text)) is not None:
            return known
        decision = _decide_short(text, later)
        if not later:
            remember_decision(text, decision)
        return decision
    if any(part.strip() for part in re.split(router_words.SPLIT, text)):
        return Decision("direct", "a long text is given")
    return Decision("direct", NO_WORDS)


# The newest decisions on questions without an earlier answer, by the question's text. One request asks twice
# or three times about its question, for the decision, the forecast and the loop rule, and a search by all
# rules takes as long as a hundred tokens of the answer.
_known: OrderedDict[str, Decision] = OrderedDict()


def remember_decision(question: str, decision: Decision) -> None:
    """Let `decide_question` return a decision that was made already, perhaps in another process of this
    program. Only the newest KNOWN_QUESTIONS are remembered.

    question: the text that the client asks, without an earlier answer.
    decision: what `decide_question` has returned for this question.
    """
    _known[question.strip()] = decision
    if len(_known) > KNOWN_QUESTIONS:
        _known.popitem(last=False)


def _decide_short(text: str, later: bool) -> Decision:
    """Decide by the words of a question of at most LONG_TEXT characters; see `decide_question`. Reasons
    against a plan are looked for first: code, arithmetic, a reference back, a form of one answer, a yes-or-no
    question, and more than MAX_LIST_POINTS things. Then a sentence that asks for a list is planned; without
    one the reason is ONE_CAUSE if a sentence asks for one cause, else UNDECIDED.

    text: the question, without white space around it.
    later: True if the conversation already has an answer, so that the question may refer back to it.
    """
    parts = _sentences(text)
    if not parts:
        return Decision("direct", NO_WORDS)
    asked = _without_thanks(parts)
    reasons: tuple[Callable[[], str | None], ...] = (
        lambda: CODE if _is_code(text, parts) else None,
        lambda: "arithmetic" if _is_maths(text) else None,
        lambda: "it refers back" if later and _refers_back(text) else None,
        lambda: _form_in(text, parts),
        lambda: _last_form(asked[-1]),
        lambda: YES_OR_NO if _starts(router_words.YES_OR_NO, asked[-1]) else None,
        lambda: (
            f"more than {MAX_LIST_POINTS} points" if (points_asked(text) or 0) > MAX_LIST_POINTS else None
        ),
    )
    for find in reasons:
        if reason := find():
            return Decision("direct", reason)
    explained = [part for part in asked if _wants_one_cause(part)]
    asking = [part for part in asked if part not in explained]
    if len(asked) > 1:
        asking = [part for part in asking if not _starts(router_words.OF_THE_ANSWER, part)]
    if any(_starts(router_words.LIST, part) for part in asking):
        return Decision("sot", SEVERAL_POINTS)
    return Decision("direct", ONE_CAUSE if explained else UNDECIDED)


def points_asked(question: str) -> int | None:
    """Return the number of things that a question asks for explicitly: "List five European rivers." -> 5.
    Return None if it names no number. The number may be written in figures or as a word of one of the
    languages.

    question: the text that the client asks.
    """
    found = _compiled(router_words.ASKED).search(_bare(question))
    if found is None:
        return None
    count = found["count"]
    return int(count) if count.isdecimal() else router_words.NUMBERS[count]


def _sentences(text: str) -> tuple[str, ...]:
    """Return the sentences of a text, as `_bare` returns each.

    text: the question, or a system message.
    """
    return tuple(_bare(part) for part in re.split(router_words.SPLIT, text.strip()) if part.strip())


def _bare(part: str) -> str:
    """Return the sentence in lower case without polite phrases: "Could you please tell me how ..." -> "how
    ...".

    part: a sentence of the question.
    """
    before = ""
    part = part.strip().lower()
    while before != part:
        before = part
        part = re.sub(router_words.POLITE, "", part).lstrip(" ,:;-")
    return part


def compares(question: str) -> bool:
    """Return True if the question compares things, as "Compare renting and buying." does. Either the question
    contains such words, or one of its sentences begins with them.

    question: the text that the client asks.
    """
    anywhere, first = router_words.COMPARING
    return _holds(anywhere, question) or any(_starts(first, part) for part in _sentences(question))


def asks_for_things(question: str) -> bool:
    """Return True if the rules plan a question because it asks for several things, such as advice, causes or
    ideas. Return False if one of its sentences asks to explain something, or if it compares things.

        "Which skills does a manager need?", "How can I sleep better?" -> True
        "How does the tide work?", "Compare trains and cars." -> False

    question: the text that the client asks.
    """
    if decide_question(question).mode != "sot" or compares(question):
        return False
    return not any(_starts(router_words.EXPLAINING, part) for part in _sentences(question))


def _is_code(text: str, parts: Sequence[str]) -> bool:
    """Return True if code is given, or is what answers the question. If a sentence asks for advice, only the
    other sentences are searched for code that is asked for.

    A programming language that is named asks for code, unless the question is about languages. Sentences that
    ask for advice in prose do not count ("How can I make a web page load faster?").

    text: the question that the client asks.
    parts: its sentences, in lower case and without polite phrases.
    """
    if _holds(router_words.CODE_GIVEN, text):
        return True
    others = [part for part in parts if not _starts(router_words.ADVICE, part)]
    text = text if len(others) == len(parts) else "\n".join(others)
    # Chinese has no spaces around words of other scripts, so that \b does not match in "用Python读".
    spaced = _BESIDE_HAN.sub(" ", text)
    return _holds(router_words.CODE_ASKED, text) or (
        _holds(router_words.PROGRAMMING_LANGUAGES, spaced) and not _holds(router_words.ABOUT_LANGUAGES, text)
    )


def _is_maths(text: str) -> bool:
    """Return True if the text has figures with operators between them, or two quantities and a question for a
    third.

    text: the question that the client asks.
    """
    return _holds(router_words.MATHS, text) or (
        len(_compiled(router_words.NUMBER).findall(text)) > 1 and _holds(router_words.QUANTITY, text)
    )


def _refers_back(text: str) -> bool:
    """Return True if a later question refers to what was said before: it is very short, short with a pronoun,
    or begins like a follow-up. Very short are at most FEW_WORDS words, and short at most FOLLOW_UP_WORDS;
    every character of Han script counts as a word of its own.

    text: a question of a conversation that already has an answer.
    """
    words = len(text.split()) + len(re.findall(router_words.HAN, text))
    short = words <= FEW_WORDS or (words <= FOLLOW_UP_WORDS and _holds(router_words.PRONOUNS, text))
    return short or _holds(router_words.FOLLOW_UP, text)


def _form_in(text: str, parts: Sequence[str]) -> str | None:
    """Return the name of a form of one answer (such as a poem) that the text contains or that a sentence of
    it begins with; None if there is none. Forms are tried in the order of the table.

    text: the question that the client asks.
    parts: its sentences, in lower case and without polite phrases.
    """
    return next((name for name in router_words.FORMS if _has_form(name, text, parts)), None)


def _has_form(name: str, text: str, parts: Sequence[str]) -> bool:
    """Return True if the text contains a form of one answer, or a sentence of it begins with the form.

    name: a key of `router_words.FORMS`.
    text: the question, or a system message.
    parts: its sentences, in lower case and without polite phrases.
    """
    anywhere, first = router_words.FORMS[name]
    return _holds(anywhere, text) or any(_starts(first, part) for part in parts)


def _last_form(part: str) -> str | None:
    """Return the name of the form with which the last sentence begins, or None if it begins with none.

    part: the sentence, in lower case and without polite phrases.
    """
    return next((name for name, first in router_words.LAST_FORMS.items() if _starts(first, part)), None)


def _without_thanks(parts: Sequence[str]) -> Sequence[str]:
    """Return the sentences without small talk at the end, which says nothing about the question. The first
    sentence always stays.

    parts: the sentences of a question, in order, at least one.
    """
    small_talk = router_words.LAST_FORMS["small talk"]
    while len(parts) > 1 and _starts(small_talk, parts[-1]):
        parts = parts[:-1]
    return parts


def _wants_one_cause(part: str) -> bool:
    """Return True if the sentence asks for one explanation, as "Why is the sky blue?" does.

    Reasons for what people do or should do, for what is good or bad, for what grows or ends, and for what
    happened are several, so such questions return False.

    part: the sentence, in lower case and without polite phrases.
    """
    return _starts(router_words.WHY, part) and not _holds(router_words.SEVERAL_REASONS, part)


def _holds(pattern: str, text: str) -> bool:
    """Return True if the text contains the pattern, in any case.

    pattern: a regular expression of `router_words`.
    text: the question, or a sentence of it.
    """
    return _compiled(pattern).search(text) is not None


def _starts(pattern: str, text: str) -> bool:
    """Return True if the text begins with the pattern, in any case.

    pattern: a regular expression of `router_words`.
    text: the question, or a sentence of it.
    """
    return _compiled(pattern).match(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern, which ignores case. Each pattern is compiled once.

    pattern: a regular expression of `router_words`.
    """
    return re.compile(pattern, re.IGNORECASE)
