"""Computes which tokens may follow, so that the output is a valid skeleton within its token budget.

A token may follow if its bytes stay within the grammar, and if the output can then be ended within the
budget. The shortest known ending follows the first edges of the grammar (`language.onward`) and is spelled in
as few tokens as possible. The first token of this ending always passes the test, so some token is allowed
everywhere except at the end.

How a mask is computed. All tokens are sorted into tries by their bytes. From one place of the byte automaton,
the tries are walked level by level with NumPy, so that every token's place is known at once. What a token
costs and needs depends only on the place after it, and is stored once per place (`TokenReach`). A mask then
compares these numbers with the budgets of the sequence (`TokenReach.fitting`).

All sequences of one tokenizer share the tables (`PlanTables`), because no budget is part of them: neither the
tokens that a plan may have, nor its points, nor the bytes and words of a title. `TokenAutomaton` adds the
budgets of one sequence, and is cheap to make.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary, spelling_of
from specsot.errors import ModelError
from specsot.grammar import language
from specsot.grammar.byte_table import DEAD, NO_ROW, ByteTable, recount, uncount
from specsot.grammar.language import Done, Place
from specsot.grammar.paths import PathCheck, step_by_step
from specsot.grammar.token_reach import UNREACHABLE_TOKENS, Mask, ReachSearch, TokenReach

# Bytes. Bounds the cache of masks of one tokenizer; when it is full, all masks are dropped. Untuned.
_MASK_BYTES: Final = 32 << 20
# Masks. Bounds the same cache for small vocabularies. Untuned.
_MAX_MASKS: Final = 1 << 14
# Tables. Bounds the tables that are kept; there is one set per tokenizer and per set of tool names. Untuned.
MAX_CACHED_TABLES: Final = 8

# What a mask depends on: number of the place, bytes and words left for the title, budget of free text, budget
# of a plan, and the end tokens.
MaskKey = tuple[int, int, int, int, int, tuple[int, ...]]


class State(NamedTuple):
    """A state of a `TokenAutomaton` within one output. Only automata over the same tables can use it.

    place: number of the place in the tables' `ByteTable`.
    bytes_left: number of bytes that the title may still have; 0 outside titles.
    words: number of words that the title of a list may still begin; MAX_TITLE_WORDS elsewhere.
    num_tokens: number of tokens so far.
    """

    place: int
    bytes_left: int
    words: int
    num_tokens: int


class TokenAutomaton:
    """A `Grammar` of the skeleton language over the tokens of one vocabulary, with the budgets of one
    sequence.

    Safe to share between threads.

    rules: the rules of the skeleton, with its budgets.
    vocabulary: the bytes of every token id.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        rules: PlanRules,
        ends: tuple[int, ...] = (),
        tables: PlanTables | None = None,
    ) -> None:
        """Create the grammar of one sequence, over tables that all sequences share.

        vocabulary: the bytes of every token id.
        rules: the rules of the skeleton: its points, its tools, and the tokens that a plan may have.
        ends: tokens that may end a numbered list, in addition to its own end. Ids outside of the vocabulary
            are ignored.
        tables: the tables of the vocabulary and the rules' tools, if the caller has them. With None, they are
            looked up or built.

        Raises ModelError if the vocabulary cannot spell the language.
        """
        self.rules = rules
        self.vocabulary = vocabulary
        self._tables = tables or tables_of(vocabulary, rules.tools)
        self._ends = tuple(end for end in ends if end < len(vocabulary))
        self._start = self._tables.enter(language.begin(rules))
        if self._tables.ending(self._start.place) >= UNREACHABLE_TOKENS:
            raise ModelError("the tokenizer has no tokens for the skeleton language")

    def start(self) -> State:
        """Return the state before the first token."""
        return self._start

    def finished(self, state: State) -> bool:
        """Return whether the output is complete, so that no token may follow.

        state: the state after the tokens so far.
        """
        return self._tables.is_done(state.place)

    def advance(self, state: State, token: int) -> State | None:
        """Return the state after a token, or None if the grammar forbids the token. Ignores budgets.

        None also for tokens without text and for ids outside of the vocabulary.

        state: the state before the token.
        token: token id.
        """
        return self._tables.advance(state, token)

    def path_check(self, state: State) -> PathCheck:
        """Return a check for many paths from one state, such as the paths of a draft tree.

        A path may be checked only after the path without its last token.

        state: the state before the first token of every path.
        """
        return step_by_step(self.advance, state)

    def mask(self, state: State, remaining: int) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only and shared. All False at the end.

        state: the state before the token.
        remaining: number of tokens that the sequence may still generate, this one included. If the shortest
            ending needs more, only tokens of shortest endings are allowed.
        """
        return self._tables.mask(state, *self._rooms(state, remaining), self._ends)

    def allows(self, state: State, token: int, remaining: int) -> bool:
        """Return True if one token may follow, as `mask` says for all tokens. The mask is not computed.
        Return False for every token at the end.

        state: the state before the token.
        token: token id.
        remaining: number of tokens that the sequence may still generate, this one included.

        False also for a token without text and for an id outside of the vocabulary, and for a token after
        which the shortest ending would exceed the budget. An end token is allowed, whatever the budget is,
        where a list may stop.
        """
        tables = self._tables
        if tables.is_done(state.place):
            return False
        if token in self._ends and tables.may_stop(state.place):
            return True
        after = tables.advance(state, token)
        if after is None:
            return False
        room, room_planned = self._rooms(state, remaining)
        return tables.ending(after.place) < (room_planned if tables.is_planned(after.place) else room)

    def forced(self, state: State) -> tuple[int, ...]:
        """Return tokens for the bytes that the grammar determines from this state on; () if it leaves a
        choice, and at the end.

        The bytes are tokenized by greedy longest match. `advance` accepts each token, but a mask may forbid
        it because of the budget.

        state: the state before the first of these tokens.
        """
        return self._tables.forced(state)

    def explore(self) -> Iterator[None]:
        """Compute what masks are made of, for every place that can be reached, and yield None after each
        place.

        Places are explored in the order of their distance from the start. Places that were explored before
        are not yielded. Places within a character are left out: few tokens end there, and few can follow.
        """
        return self._tables.explore_from(self._start.place)

    def _rooms(self, state: State, remaining: int) -> tuple[int, int]:
        """Return how many tokens may still be generated, the next one included: if the output is a direct
        answer, and if it is a plan.

        At least one token of a shortest ending fits. If the output is certainly a plan already, the first
        number is 0.

        state: the state before the next token.
        remaining: number of tokens that the sequence may still generate, the next one included.

        The second number is the smaller one of `remaining` and what is left of the rules' `plan_tokens`; it
        is never below 0. A number is raised to the length of a shortest ending, so that the mask always
        leaves a way to the end.
        """
        ending_tokens = self._tables.ending(state.place)
        planned = min(remaining, self.rules.plan_tokens - state.num_tokens)
        if self._tables.is_planned(state.place):
            return 0, max(planned, ending_tokens)
        return max(remaining, ending_tokens), max(planned, 0)


@functools.lru_cache(maxsize=MAX_CACHED_TABLES)
def tables_of(vocabulary: Vocabulary, tools: tuple[str, ...] = ()) -> PlanTables:
    """Return the tables of a tokenizer, which the whole process shares. They are built at the first call.

    vocabulary: the bytes of every token id.
    tools: the names that may stand in TOOL besides None. They are the only rule that tables depend on.
    """
    return PlanTables(vocabulary, PlanRules(tools=tools))


class PlanTables:
    """Places, token costs and masks of the skeleton language over one vocabulary, for all budgets.

    Safe to share between threads.
    """

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules) -> None:
        """Create tables that contain only the two places of the end. Others are added when they are needed.

        vocabulary: the bytes of every token id.
        rules: the rules of the skeleton. Only its tool names are used.
        """
        self.vocabulary = vocabulary
        self._rules = rules
        self._table = ByteTable(rules)
        self._spelling = spelling_of(vocabulary)
        self._search = ReachSearch(vocabulary, self._table, self._spelling)
        self._reaches: dict[int, TokenReach] = {}
        self._masks: dict[MaskKey, Mask] = {}
        self._max_masks = min(_MASK_BYTES // max(len(vocabulary), 1) + 1, _MAX_MASKS)
        self._stretches: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._explored: set[int] = set()
        # Held while `_table`, `_search`, `_reaches` or the masks grow.
        self._lock = threading.Lock()
        self._done = frozenset({self._table.number(Done(plan=True)), self._table.number(Done(plan=False))})
        self._nothing = _freeze(np.zeros(len(vocabulary), dtype=np.bool_))

    def enter(self, place: Place) -> State:
        """Return the state at a place before the first token.

        place: the first place, as `language.begin` returns it.
        """
        alike, bytes_left, words = uncount(place)
        with self._lock:
            return State(self._table.number(alike), bytes_left, words, 0)

    def is_done(self, place: int) -> bool:
        """Return whether no token may follow a place.

        place: number of the place.
        """
        return place in self._done

    def is_planned(self, place: int) -> bool:
        """Return whether the output is certainly a plan. False in a direct answer, and while one may still be
        chosen.

        place: number of the place.
        """
        return self._table.planned[place]

    def may_stop(self, place: int) -> bool:
        """Return whether an end token may follow a place. False in plans with markers and in direct answers.

        place: number of the place, other than DEAD.
        """
        return language.may_stop(self._table.place(place))

    def ending(self, place: int) -> int:
        """Return the number of tokens of the shortest ending from a place; 0 at the end.

        Returns UNREACHABLE_TOKENS if the vocabulary cannot spell the ending.

        place: number of the place.

        The result is cached. May be called from any thread.
        """
        found = self._search.endings.get(place)
        if found is None:
            with self._lock:
                found = self._search.ending(place)
        return found

    def advance(self, state: State, token: int) -> State | None:
        """Return the state after a token, or None if the grammar forbids the token. Ignores budgets of
        tokens.

        None also for tokens without text, for ids outside of the vocabulary, and for tokens whose bytes or
        words the title has no room for.

        state: the state before the token.
        token: token id.

        The number of tokens in the state is one higher. Places that are met for the first time are added to
        the table.
        """
        text = self.vocabulary.bytes[token] if 0 <= token < len(self.vocabulary) else None
        if not text:
            return None
        table = self._table
        place = state.place
        bytes_left = state.bytes_left
        words = state.words
        for byte in text:
            row = table.row[place]
            if row == NO_ROW:
                with self._lock:
                    row = table.fill(place)
            before = place
            place = table.next.item(row, byte)
            if table.open[place]:
                bytes_left -= 1
                words -= int(table.rank[place] > table.rank[before])
                if bytes_left < table.owed[place] or words < 0:
                    return None
            elif place == DEAD:
                return None
        return self._settle(place, bytes_left, words, state.num_tokens + 1)

    def mask(self, state: State, room: int, room_planned: int, ends: tuple[int, ...]) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only and shared. All False at the end.

        state: the state before the token.
        room: number of tokens that may still be generated, this one included, if the output is a direct
            answer.
        room_planned: the same number if the output is a plan.
        ends: the tokens that may follow wherever the output may stop.

        Must not be written to. `ends` are ignored where the output may not stop.
        """
        if state.place in self._done:
            return self._nothing
        reach = self._reaches.get(state.place) or self._explore(state.place)
        # Each part of the key is reduced as far as the mask does not change, so that many states share one
        # mask: budgets above `roomy` forbid no token, and bytes and words are rounded down to the next need
        # of any token.
        key = (
            reach.number,
            reach.steps[state.bytes_left],
            reach.word_steps[state.words],
            min(room, reach.roomy),
            min(room_planned, reach.roomy),
            ends,
        )
        found = self._masks.get(key)
        return self._draw(reach, key) if found is None else found

    def forced(self, state: State) -> tuple[int, ...]:
        """Return tokens for the bytes that the grammar determines, see `TokenAutomaton.forced`; () if it
        leaves a choice. Results are cached.

        state: the state before the first of these tokens.

        Only the first bytes that tokens of the vocabulary can spell are covered, by greedy longest match; ()
        also if none can.
        """
        key = (state.place, state.bytes_left, state.words)
        found = self._stretches.get(key)
        if found is None:
            place = recount(self._table.place(state.place), state.bytes_left, state.words)
            found = self._spelling.split(language.forced(self._rules, place))
            if len(self._stretches) >= _MAX_MASKS:
                self._stretches.clear()
            self._stretches[key] = found
        return found

    def explore_from(self, start: int) -> Iterator[None]:
        """Compute what masks are made of, for every place that can be reached, and yield None after each
        place.

        Places that were explored before are not visited again; places within a character are left out.

        start: number of the place where the exploration begins.

        Yields nothing if all reachable places were explored before. An exploration that is abandoned is not
        resumed by a later call from the same place, which yields nothing.
        """
        waiting = deque([start])
        while waiting:
            number = waiting.popleft()
            if number in self._explored or number in self._done:
                continue
            self._explored.add(number)
            if language.is_within_character(self._table.place(number)):
                continue
            self._explore(number)
            with self._lock:
                row = self._table.fill(number)
                following = np.unique(self._table.next[row]).tolist()
                waiting += [self._table.uncounted(each) for each in following if each != DEAD]
            yield

    def _settle(self, number: int, bytes_left: int, words: int, num_tokens: int) -> State:
        """Return the state at a place. If a token entered a title, the title's counts move to the state.

        The byte table has titles without counts, so that titles of different lengths share their places.

        number: number of the place after the token.
        bytes_left: number of bytes that the title may still have, if the place is in a title without counts.
        words: number of words that the title may still begin, if the place is in a title without counts.
        num_tokens: number of tokens so far, the token included.

        If the place is in no title, `bytes_left` is 0 and `words` is MAX_TITLE_WORDS in the result.
        """
        if self._table.open[number]:
            return State(number, bytes_left, words, num_tokens)
        place = self._table.place(number)
        alike, bytes_left, words = uncount(place)
        if alike is not place:
            with self._lock:
                number = self._table.number(alike)
        return State(number, bytes_left, words, num_tokens)

    def _explore(self, place: int) -> TokenReach:
        """Return the tokens that can follow a place, computed at the first call.

        place: number of the place.

        May be called from any thread; only one computes at a time.
        """
        with self._lock:
            if place not in self._reaches:
                self._reaches[place] = self._search.explore(place)
            return self._reaches[place]

    def _draw(self, reach: TokenReach, key: MaskKey) -> Mask:
        """Compute the mask of a key, add it to the cache, and return it. If the cache is full, all other
        masks are dropped.

        reach: the tokens that can follow the place.
        key: what the mask depends on, see `MaskKey`.

        The end tokens are allowed only where the output may stop. Returns the mask that is in the cache,
        which another thread may have added first.
        """
        _, bytes_left, words, room, room_planned, ends = key
        mask = reach.fitting(bytes_left, words, room, room_planned)
        if ends and language.may_stop(self._table.place(reach.number)):
            mask[list(ends)] = True
        with self._lock:
            if len(self._masks) >= self._max_masks:
                self._masks.clear()
            return self._masks.setdefault(key, _freeze(mask))


def _freeze(mask: Mask) -> Mask:
    """Make a mask read-only, and return it.

    mask: [vocabulary size].
    """
    mask.flags.writeable = False
    return mask
