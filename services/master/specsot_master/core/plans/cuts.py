"""Where a text is cut off: at a stop string, and where it begins to repeat itself.

Small models fall into loops: a sentence again, a clause or a line again and again, the same under new
numbers. Other branches are not looked at: which of two has written a sentence first depends on the
machines, and a text must not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Letters and digits from which on the like of them is a loop, and not a turn of speech: of a sentence that
# comes again, or of all that comes a third time. One that fills a line may be a refrain, or a step of a
# list, unless it is long. Set before they were tried: docs/results/real-model.md, "Loops".
_LEAST = 24
_LEAST_LINE = 60
_LONGEST_PERIOD = 32  # clauses of a loop; bounds the search, not measured
# Letters of a word or phrase that a clause says again and again, and how often at least; not measured.
_LONGEST_WORD = 16
_TIMES = 4
_ENDS = frozenset("。！？，；：、")  # behind which a clause ends without white space
_STOP = re.compile(r"(?:[.!?…][\"')\]*”’]*\s|[。！？])\Z")
_PAUSE = re.compile(r"(?:[,;:][\"')\]*”’]*\s|[，；：、])\Z")
# Quotes, bullets and the number of a list's item.
_LEAD = re.compile(r"\W*(?:\d{1,3}[.):、．](?:\W|$)\W*)?")
_SIGN = re.compile(r"[\W_]+")
_FENCES = ("```", "~~~")


@dataclass(frozen=True, slots=True)
class LoopRule:
    """When a text repeats itself so much that it is ended.

    sentences: times that a sentence comes, wherever, until it is a loop.
    cycles: times that anything comes in a row until it is a loop: a line, or several in one order.
    words: whether a clause that says one word or phrase again and again is a loop, too.
    """

    sentences: int
    cycles: int
    words: bool


# A branch has two or three sentences, so that one that comes a second time is a loop.
BRANCH_LOOPS = LoopRule(sentences=2, cycles=3, words=True)
# A direct answer may end several items of a list with the same sentence, and may be asked to count or to say
# a word often. Of 30 direct answers of Qwen2.5-Coder-1.5B, two sentences end seven and three end five, some
# of them in the middle of good text; this rule ends the one that loops on.
DIRECT_LOOPS = LoopRule(sentences=5, cycles=4, words=False)


class StopStrings:
    """Feed text in pieces of any size; what comes out never holds a stop string, nor what follows one.

    The stop string that is complete first wins, so that pieces of any size give the same text; of two
    that are complete at once, the longer. shown: those of them that come out, too.
    """

    def __init__(self, stops: Iterable[str] = (), shown: Collection[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._shown = shown
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = {stop[0] for stop in self._stops}
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Empty for ever once a stop string was hit."""
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        text = self._held + text
        cuts = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if cuts:
            end, place, self.hit = min(cuts)
            self._held = ""
            return text[: end if self.hit in self._shown else place]
        safe = len(text) - self._suspicious(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held = self._held
        self._held = ""
        return held

    def _suspicious(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[start] in self._firsts and any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0


class LoopWatch:
    """Feed it an answer's text; what comes out holds no loop, nor what follows it.

    What is compared is letters, without bullet, number, case and punctuation. It is a loop when a sentence
    of some length comes as often as the rule says; when anything comes in a row as often as it says; or,
    where the rule says so, when a clause says a word or phrase again and again. So refrains, rows of tables
    and short phrases may come again; code between fences is not looked at. What was said before is held
    back until something new follows it. All this goes by characters, so pieces of any size give the same
    text.
    """

    def __init__(self, rule: LoopRule = BRANCH_LOOPS) -> None:
        self._rule = rule
        self._clauses: list[str] = []  # letters of each, as they came
        self._matches = [0] * (_LONGEST_PERIOD + 1)  # by period: how many of the last ones came one before
        self._sentences: dict[str, int] = {}  # the long ones, and how often each has come
        # the one that is being written; characters of it that are out
        self._clause = ""
        self._out = 0
        self._tail = ""  # the last letters of the clause, its bullet and number included
        # letters and clauses of the one that is being written
        self._sentence = ""
        self._parts = 0
        self._pending: list[tuple[str, str]] = []  # clauses that were said before: letters and text
        # the clause begins a line; so did the sentence
        self._begins = True
        self._fills = True
        self._fenced = False
        self.repeats = False

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Empty for ever once it repeats itself."""
        shown: list[str] = []
        for character in text:
            if self.repeats:
                break
            self._clause += character
            letter = _SIGN.sub("", character.casefold())
            self._tail = (self._tail + letter)[-_LONGEST_WORD * _TIMES - _LEAST :]
            may_end = character.isspace() or character in _ENDS
            if character == "\n" or (may_end and not self._fenced and self._is_ended()):
                shown.append(self._end())
            elif letter and self._rule.words and not self._fenced and self._stutters():
                self.repeats = True
                shown.append(self._release())
        return "".join(shown) + ("" if self.repeats or self._may_repeat() else self._release())

    def flush(self) -> str:
        """What was held back, when no more text comes; the beginning of a loop is left out, too."""
        if self.repeats:
            return ""
        begun = self._sentence + self._letters()
        looped = len(begun) >= _LEAST and self._is_begun(begun, self._rule.sentences - 1)
        return self._cut(self._parts) if looped else self._release()

    def _is_ended(self) -> bool:
        end = max(len(self._clause) - 6, 0)
        found = _STOP.search(self._clause, end) or _PAUSE.search(self._clause, end)
        return bool(found and self._letters())

    def _stutters(self) -> bool:
        """The clause goes on and on with one word or phrase; a figure and a row of one letter may."""
        said = self._tail
        for size in range(1, min(_LONGEST_WORD, len(said) - 1) + 1):
            if said[-1] != said[-1 - size]:
                continue
            times = max(_TIMES, -(-_LEAST // size))
            word = said[-size:]
            if said.endswith(word * times) and len(said) >= size * times:
                return not word.isdecimal() and (len(set(word)) > 1 or word[0] > "\u3000")
        return False

    def _letters(self) -> str:
        said = _LEAD.sub("", self._clause, count=1) if self._begins else self._clause
        return _SIGN.sub("", said.casefold())

    def _may_repeat(self) -> bool:
        letters = self._letters()
        if self._fenced:
            return False
        if not letters or (self._begins and letters.isdecimal()):
            return True
        return self._is_begun(self._sentence + letters) or any(
            one.startswith(letters) for one in self._clauses
        )

    def _is_begun(self, sentence: str, times: int = 1) -> bool:
        """Whether a sentence that has come so often begins with these letters."""
        return any(count >= times and one.startswith(sentence) for one, count in self._sentences.items())

    def _end(self) -> str:
        letters = self._letters()
        clause = self._clause
        began = self._begins
        self._pending.append((letters, clause[self._out :]))
        self._clause = ""
        self._tail = ""
        self._out = 0
        self._begins = clause.endswith("\n")
        if began and clause.lstrip().startswith(_FENCES):
            self._fenced = not self._fenced
        if self._fenced or not letters:
            return self._release() if self._fenced else ""
        if not self._parts:
            self._fills = began
        said = letters in self._clauses or self._is_begun(self._sentence + letters)
        self._sentence = self._sentence + letters
        self._parts = self._parts + 1
        if looped := self._count_looped(letters) or self._count_said(clause):
            return self._cut(looped)
        return "" if said else self._release()

    def _count_looped(self, letters: str) -> int:
        """Clauses up to here that come in a row too often: all but those of the first time."""
        self._clauses.append(letters)
        for period in range(1, min(len(self._clauses), _LONGEST_PERIOD + 1)):
            same = self._clauses[-1 - period] == letters
            self._matches[period] = count = self._matches[period] + 1 if same else 0
            if count >= (self._rule.cycles - 1) * period and sum(map(len, self._clauses[-count:])) >= _LEAST:
                return count
        return 0

    def _count_said(self, clause: str) -> int:
        """Clauses of a sentence that ends here and was said before."""
        fills = self._fills and self._begins
        if not (self._begins or _STOP.search(clause)):
            return 0
        sentence = self._sentence
        parts = self._parts
        self._sentence = ""
        self._parts = 0
        if len(sentence) < _LEAST:
            return 0
        self._sentences[sentence] = count = self._sentences.get(sentence, 0) + 1
        looped = count >= self._rule.sentences and len(sentence) >= (_LEAST_LINE if fills else _LEAST)
        return parts if looped else 0

    def _cut(self, clauses: int) -> str:
        """It repeats itself: what is shown of what was held back, without the last so many clauses."""
        self.repeats = True
        while clauses:
            clauses -= bool(self._pending.pop()[0])
        return "".join(text for _, text in self._pending)

    def _release(self) -> str:
        text = "".join(text for _, text in self._pending) + self._clause[self._out :]
        self._pending = []
        self._out = len(self._clause)
        return text
