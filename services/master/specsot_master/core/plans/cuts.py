"""Where a text is cut off: at a stop string, and where it begins to repeat itself.

Small models fall into loops: a sentence again, a clause or a line again and again, the same under new
numbers. Only the text itself is examined, never other branches: which of two branches writes a sentence first
depends on the machines, and a text must not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Letters and digits. A repeated sentence, or all repeated clauses together, must have so many to be a loop
# and not a turn of speech. Set before it was tried: of 191 branches of SmolLM2 it ended 37, and each of them
# repeated itself.
_LEAST = 24
# Letters and digits. The same for a sentence that fills a line, which may be a refrain or a step of a list.
_LEAST_LINE = 60
# Clauses. Bounds the length of a loop that is searched for. Untuned.
_LONGEST_PERIOD = 32
# Letters. Bounds the word or phrase that a clause repeats. Untuned.
_LONGEST_WORD = 16
# Times. A clause must repeat a word or phrase so often. Untuned.
_TIMES = 4
# Characters that end a clause without white space after them.
_ENDS = frozenset("。！？，；：、")
# The end of a sentence at the end of a text.
_STOP = re.compile(r"(?:[.!?…][\"')\]*”’]*\s|[。！？])\Z")
# The end of a clause at the end of a text.
_PAUSE = re.compile(r"(?:[,;:][\"')\]*”’]*\s|[，；：、])\Z")
# Quotes, bullets and the number of a list's item.
_LEAD = re.compile(r"\W*(?:\d{1,3}[.):、．](?:\W|$)\W*)?")
# Characters that are no letters or digits, which are not compared.
_SIGN = re.compile(r"[\W_]+")
# Begin and end a block of code.
_FENCES = ("```", "~~~")


@dataclass(frozen=True, slots=True)
class LoopRule:
    """When a sequence's text repeats itself so much that it is ended.

    sentences: how often a sentence may come anywhere in the text until it is a loop.
    cycles: how often a line, or a series of clauses, may come in a row until it is a loop.
    words: True if a clause that repeats one word or phrase is a loop, too.
    shown: how often such a line or series stays in the text of a loop, less than `cycles`. Text is held back
        from the next time on, because it may be cut off.
    """

    sentences: int
    cycles: int
    words: bool
    shown: int = 1


# A branch has two or three sentences, so that one that comes a second time is a loop.
BRANCH_LOOPS = LoopRule(sentences=2, cycles=3, words=True)
# A direct answer may end several items of a list with the same sentence, and may be asked to count or to say
# a word often. Of 30 direct answers of Qwen2.5-Coder-1.5B, two sentences end seven and three end five, some
# of them in the middle of good text; this rule ends the one that loops on. A client reads a direct answer
# while it is written, and lines of good text often begin like earlier ones. So a line that comes a second
# time is shown: while it was held back, 84 of 285 answers of that model stopped for more than eight tokens;
# now two do.
DIRECT_LOOPS = LoopRule(sentences=5, cycles=4, words=False, shown=2)


class StopStrings:
    """Cuts the text of one sequence at stop strings. Text may be fed in pieces of any size; the output never
    contains a stop string, nor text after it.

    The stop string that is complete first ends the text, so that the result does not depend on the pieces.
    Among stop strings that are complete at the same character, the longest wins. Stop strings in `shown` stay
    in the output.

        stops ["END"]: feed("the E") -> "the ", "E" is held back; feed("ND x") -> "" and hit = "END"
    """

    def __init__(self, stops: Iterable[str] = (), shown: Collection[str] = ()) -> None:
        """Create a cutter that has read nothing.

        stops: the stop strings; empty ones are ignored. Without any, text passes unchanged.
        shown: those of the stop strings that stay in the output; empty if none does.
        """
        self._stops = tuple(stop for stop in stops if stop)
        self._shown = shown
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = {stop[0] for stop in self._stops}
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is now safe to show; "" if all of it is held back, or once a stop string was
        hit. Without stop strings, the text is returned unchanged. `hit` is set to the stop string that ended
        the text.

        text: the next text of the sequence.
        """
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
        """Return the text that was held back, as no more text comes; "" if none was. It is returned as it is,
        even if it is the beginning of a stop string.
        """
        held = self._held
        self._held = ""
        return held

    def _suspicious(self, text: str) -> int:
        """Return the length, in characters, of the longest end of a text that is the beginning of a stop
        string; 0 if there is none. At most as many characters as the longest stop string, less one, are held.

        text: text that holds no complete stop string.
        """
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[start] in self._firsts and any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0


class LoopWatch:
    """Cuts the text of one sequence where it begins to repeat itself. Text may be fed in pieces of any size;
    the output contains no loop, nor text after it, and does not depend on the pieces.

    Texts are compared by letters, without bullets, numbers, case and punctuation. A loop is a long enough
    sentence that comes as often as the rule says; clauses that come in a row as often as it says; or, if the
    rule says so, a clause that repeats a word or phrase. So refrains, rows of tables and short phrases may
    come again. Code between fences is not examined.

    Text is held back only while it may still be part of a loop that is cut off: clauses in a row that repeat
    earlier ones, and a sentence that has already come as often as the rule allows.

        clauses [1 2 2 1 1 3], each of which has come before or may come again -> all are shown, because no
        run of them repeats the clauses before it
    """

    def __init__(self, rule: LoopRule = BRANCH_LOOPS) -> None:
        """Create a watch that has read nothing.

        rule: how often text may repeat itself.
        """
        self._rule = rule
        # The letters of every finished clause, in order.
        self._clauses: list[str] = []
        # By period p: how many of the last clauses in a row equal the clause p places before them.
        # Clauses [a b a b a] -> _matches[2] = 3.
        self._matches = [0] * (_LONGEST_PERIOD + 1)
        # The letters of every long sentence, and how often the sentence has come.
        self._sentences: dict[str, int] = {}
        # The unfinished clause, and how many of its characters were released.
        self._clause = ""
        self._out = 0
        # True once the unfinished clause differs from the beginning of all that it could repeat. Then it
        # differs however it continues.
        self._differs = False
        # The last letters of the unfinished clause, including its bullet and number.
        self._tail = ""
        # The letters of the unfinished sentence's clauses, and their number.
        self._sentence = ""
        self._parts = 0
        # Finished clauses that are held back, as (letters, text).
        self._pending: list[tuple[str, str]] = []
        # True if the unfinished clause begins a line, and if the unfinished sentence does.
        self._begins = True
        self._fills = True
        self._fenced = False
        self.repeats = False

    def feed(self, text: str) -> str:
        """Return the text that is now safe to show; "" if all of it is held back. Once the text repeats
        itself, `repeats` is True, and the result is "". Text of a loop is left out from its first repetition
        on.

        text: the next text of the sequence.
        """
        shown: list[str] = []
        for character in text:
            if self.repeats:
                break
            self._clause += character
            plain = character.isascii() and character.isalnum()
            letter = character.lower() if plain else _SIGN.sub("", character.casefold())
            self._tail = (self._tail + letter)[-_LONGEST_WORD * _TIMES - _LEAST :]
            may_end = character.isspace() or character in _ENDS
            if character == "\n" or (may_end and not self._fenced and self._is_ended()):
                shown.append(self._end())
            elif letter and self._rule.words and not self._fenced and self._stutters():
                self.repeats = True
                shown.append(self._release())
        return "".join(shown) + ("" if self.repeats or self._may_repeat() else self._release())

    def flush(self) -> str:
        """Return the text that was held back, as no more text comes; "" if none was, or once the text repeats
        itself. The beginning of a further repetition is left out. A sentence that is a beginning of one that
        has come often enough counts as a repetition, if it is long enough. At the end, a line or a series of
        clauses that has come in a row as often as a sentence may is a loop too, because the text may have
        been cut off before it came more often.
        """
        if self.repeats:
            return ""
        repeated = None if self._fenced else self._count_repeated()
        if repeated is not None:
            return self._cut(repeated)
        begun = self._sentence + self._letters()
        looped = len(begun) >= _LEAST and self._is_begun(begun, self._rule.sentences - 1)
        return self._cut(self._parts) if looped else self._release()

    def _is_ended(self) -> bool:
        """Return True if the unfinished clause ends here; a clause without letters does not end. A clause
        ends at the end of a sentence, or after a comma, semicolon or colon.
        """
        end = max(len(self._clause) - 6, 0)
        found = _STOP.search(self._clause, end) or _PAUSE.search(self._clause, end)
        return bool(found and self._letters())

    def _stutters(self) -> bool:
        """Return True if the clause repeats one word or phrase. Digits, and a row of one letter, may repeat.
        The word has at most _LONGEST_WORD letters, and it must come _TIMES times and fill _LEAST letters. A
        row of one letter of Latin script does not count.
        """
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
        """Return the letters of the unfinished clause, without a bullet or number at the beginning of a
        line.
        """
        said = _LEAD.sub("", self._clause, count=1) if self._begins else self._clause
        return _SIGN.sub("", said.casefold())

    def _may_repeat(self) -> bool:
        """Return True if the unfinished clause may become one that a loop's cut would reach, so that it must
        be held back. Return False inside code. A number at the beginning of a line does not count, because it
        may be that of a list's item.

            shown 1, clauses [a b]     -> held while it may become a or b
            shown 2, clauses [a b]     -> shown at once
            shown 2, clauses [a a]     -> held while it may become a
        """
        if self._fenced or self._differs:
            return False
        letters = self._letters()
        if self._begins and letters.isdecimal():
            letters = ""
        earlier = self._clauses
        self._differs = not self._is_begun(self._sentence + letters, self._rule.sentences - 1) and not any(
            self._matches[period] >= self._num_shown(period) and earlier[-period].startswith(letters)
            for period in range(1, min(len(earlier), _LONGEST_PERIOD) + 1)
        )
        return not self._differs

    def _num_shown(self, period: int) -> int:
        """Return how many clauses that repeat the one a period before stay in the text of a loop.

        period: number of clauses of the line or series that repeats.
        """
        return (self._rule.shown - 1) * period

    def _is_begun(self, sentence: str, times: int) -> bool:
        """Return True if a sentence that has come often enough begins with these letters.

        sentence: the letters of an unfinished sentence; "" is the beginning of every sentence.
        times: how often the sentence must have come at least.
        """
        return any(count >= times and one.startswith(sentence) for one, count in self._sentences.items())

    def _end(self) -> str:
        """Finish the clause. Return the text that can be released; "" if all of it is held back. If a loop is
        found, `repeats` is set and the text before the loop is returned. Text of code is released at once.
        """
        letters = self._letters()
        clause = self._clause
        began = self._begins
        self._pending.append((letters, clause[self._out :]))
        self._clause = ""
        self._differs = False
        self._tail = ""
        self._out = 0
        self._begins = clause.endswith("\n")
        if began and clause.lstrip().startswith(_FENCES):
            self._fenced = not self._fenced
        if self._fenced:
            return self._release()
        if not letters:
            return self._release_unlooped()
        if not self._parts:
            self._fills = began
        self._sentence = self._sentence + letters
        self._parts = self._parts + 1
        if looped := self._count_looped(letters) or self._count_written(clause):
            return self._cut(looped)
        return self._release_unlooped()

    def _release_unlooped(self) -> str:
        """Return the held-back clauses that no later cut can reach. The returned clauses are no longer held.

        A cut removes at most the clauses in a row that match earlier ones, without those that stay in the
        text of a loop, or the unfinished sentence:
        # shown 1, held back [a b c b], _matches[2] = 1, no sentence has come before -> "a b c" is released,
        # b is kept
        """
        begun = self._is_begun(self._sentence, self._rule.sentences - 1)
        cut = [count - self._num_shown(period) for period, count in enumerate(self._matches)]
        kept = max(*cut, self._parts if begun else 0)
        place = len(self._pending)
        while kept and place:
            place -= 1
            kept -= bool(self._pending[place][0])
        text = "".join(text for _, text in self._pending[:place])
        del self._pending[:place]
        return text

    def _count_looped(self, letters: str) -> int:
        """Record the finished clause. Return the number of last clauses that a loop's cut removes, which are
        all but the first occurrences (`LoopRule.shown`); 0 if there is no loop. The repeated clauses must
        have _LEAST letters together; periods of up to _LONGEST_PERIOD clauses are searched.

            cycles 3, shown 1, clauses [a b a b a b] (long enough) -> 4
            cycles 3, shown 2, the same clauses                    -> 2

        letters: the letters of the clause that has just ended.
        """
        self._clauses.append(letters)
        for period in range(1, min(len(self._clauses), _LONGEST_PERIOD + 1)):
            same = self._clauses[-1 - period] == letters
            self._matches[period] = count = self._matches[period] + 1 if same else 0
            if count >= (self._rule.cycles - 1) * period and sum(map(len, self._clauses[-count:])) >= _LEAST:
                return count - self._num_shown(period)
        return 0

    def _count_repeated(self) -> int | None:
        """Return how many finished clauses at the end of the text are repetitions, which are left out with
        the unfinished clause; None if there is no loop. The unfinished clause must be the beginning of a
        further repetition, or empty.

            sentences 2, shown 1, clauses [a b b], unfinished "" (long enough) -> 1
            sentences 2, shown 1, clauses [a b a], unfinished b (long enough)  -> 1
            sentences 5                                                        -> None
        """
        letters = self._letters()
        for period in range(1, min(len(self._clauses), _LONGEST_PERIOD) + 1):
            same = self._matches[period]
            run = self._clauses[len(self._clauses) - same :]
            if letters == self._clauses[-period]:
                run.append(letters)
            is_loop = len(run) >= (self._rule.sentences - 1) * period and sum(map(len, run)) >= _LEAST
            if is_loop and self._clauses[-period].startswith(letters):
                return max(same - self._num_shown(period), 0)
        return None

    def _count_written(self, clause: str) -> int:
        """Return the number of clauses of the sentence that ends here, if the sentence has come too often;
        else 0. A clause that ends neither a sentence nor a line returns 0. A sentence that fills its line
        needs _LEAST_LINE letters, any other one _LEAST. Too often is as often as the rule's `sentences` says.

        clause: the text of the clause that has just ended.
        """
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
        """End the text. Return the part of the held-back text that is shown. `repeats` is set.

        clauses: how many of the last clauses are left out; clauses without letters come in addition.
        """
        self.repeats = True
        # Clauses before a fence were shown when the fence began, so they cannot be cut off any more.
        while clauses and self._pending:
            clauses -= bool(self._pending.pop()[0])
        return "".join(text for _, text in self._pending)

    def _release(self) -> str:
        """Return all held-back text and the unfinished clause; "" if there is none. Nothing is held
        afterwards.
        """
        text = "".join(text for _, text in self._pending) + self._clause[self._out :]
        self._pending = []
        self._out = len(self._clause)
        return text
