"""Finds which tokens can follow a place of the byte automaton, and how much of each budget they need.

A token is allowed if the budgets cover what it needs: the tokens that may still be generated, and the bytes
and words that the title may still have. What a token needs depends on the place alone, so it is computed once
for each place (`ReachSearch`), and compared with the budgets of each sequence (`TokenReach.fitting`). The
*cost* of a token is the number of tokens of the shortest ending after it: the tokens that complete the output
from the place after the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS
from specsot.core.vocabulary import Spelling, Vocabulary
from specsot.grammar import language
from specsot.grammar.byte_table import DEAD, ByteTable, Number
from specsot.grammar.language import Done, ListTitle, Literal, NumberedLine, Place, Title
from specsot.grammar.token_trie import Ints, Trie, TrieLevel, build_tries, max_lines_started, ranges

Mask = NDArray[np.bool_]

# Tokens. The cost of an ending that the vocabulary cannot spell, which exceeds every budget.
UNREACHABLE_TOKENS: Final = 1 << 14
# Fraction of the vocabulary. If more tokens than this can follow a place, costs and needs are stored for all
# tokens of the vocabulary, because comparing contiguous arrays is faster than gathering. Untuned.
_MIN_DENSE_SHARE: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class ReachPart:
    """Tokens that can follow a place of the byte automaton, and how much of each budget they need.

    tokens: [k], token ids. None if the other arrays have an entry for every token of the vocabulary; then the
        cost of a token that cannot follow is UNREACHABLE_TOKENS.
    costs: [k], number of tokens of the shortest ending after each token.
    needs: [k], how many bytes the title at this place must have left for each token.
    words: [k], how many words the title of a list must have left for each token.
    planned: [k], whether the output is certainly a plan after each token; or one value for all tokens.
    max_need: the largest of `needs`.
    max_words: the largest of `words`.
    """

    tokens: Ints | None
    costs: NDArray[np.int16]
    needs: NDArray[np.uint8]
    words: NDArray[np.uint8]
    planned: Mask | bool

    max_need: int = field(init=False)
    max_words: int = field(init=False)

    def __post_init__(self) -> None:
        """Set `max_need` and `max_words` to the largest entries of `needs` and `words`; to 0 if there are
        none.
        """
        object.__setattr__(self, "max_need", int(self.needs.max(initial=0)))
        object.__setattr__(self, "max_words", int(self.words.max(initial=0)))

    def fits(self, bytes_left: int, words: int, room: int, room_planned: int) -> Mask:
        """Return which of the tokens are allowed, see `TokenReach.fitting`: [k], in the order of `tokens`.

        bytes_left: number of bytes that the title may still have.
        words: number of words that the title may still begin.
        room: number of tokens that may still be generated, this one included, if the output is a direct
            answer.
        room_planned: the same number if the output is a plan.

        A token is allowed if its cost is less than the room that applies to it, and its title has the bytes
        and words that it needs. The result is a new array.
        """
        if isinstance(self.planned, bool):
            fits = self.costs < np.int16(room_planned if self.planned else room)
        else:
            fits = self.costs < np.where(self.planned, np.int16(room_planned), np.int16(room))
        if bytes_left < self.max_need:
            fits &= self.needs <= np.uint8(bytes_left)
        if words < self.max_words:
            fits &= self.words <= np.uint8(words)
        return fits


@dataclass(frozen=True, slots=True)
class TokenReach:
    """All tokens that can follow one place of the byte automaton, with how much of each budget they need.

    number: number of a place that stands for all places with the same tokens.
    size: number of tokens of the vocabulary.
    parts: the tokens without a line feed, and the tokens with one.
    roomy: the smallest budget of tokens that forbids none of these tokens.
    steps: for each number of bytes left for a title, the smallest number that allows the same tokens. If
        tokens need 0, 2 or 5 bytes, steps is (0, 0, 2, 2, 2, 5, 5, ...).
    word_steps: the same for each number of words.
    """

    number: int
    size: int
    parts: tuple[ReachPart, ReachPart]
    roomy: int
    steps: tuple[int, ...]
    word_steps: tuple[int, ...]

    def fitting(self, bytes_left: int, words: int, room: int, room_planned: int) -> Mask:
        """Return which tokens are allowed, as a new array: [vocabulary size].

        bytes_left: number of bytes that the title may still have.
        words: number of words that the title may still begin.
        room: number of tokens that may still be generated, this one included, if the output is a direct
            answer.
        room_planned: the same number if the output is a plan.

        A token is allowed if the part that has the token allows it. All False if no token fits.
        """
        mask: Mask | None = None
        for part in self.parts:
            if part.tokens is None:
                fits = part.fits(bytes_left, words, room, room_planned)
                mask = fits if mask is None else mask | fits
        if mask is None:
            mask = np.zeros(self.size, dtype=np.bool_)
        for part in self.parts:
            if part.tokens is not None:
                mask[part.tokens[part.fits(bytes_left, words, room, room_planned)]] = True
        return mask


class ReachSearch:
    """Search for the tokens that can follow a place of a byte table, which caches its results. Not
    thread-safe: its owner holds a lock.

    endings: by the number of a place, the number of tokens of the shortest ending from the place. It has only
        the places for which this was computed.
    """

    def __init__(self, vocabulary: Vocabulary, table: ByteTable, spelling: Spelling) -> None:
        """Build the tries of the vocabulary, which are cached.

        vocabulary: the bytes of every token id.
        table: the byte automaton, to which places are added while they are explored.
        spelling: counts the tokens of endings.
        """
        # The tries of the tokens without a line feed, and of those with one.
        self._within_line, self._across_lines = build_tries(vocabulary)
        self._max_lines_started = max_lines_started(vocabulary)
        self._size = len(vocabulary)
        self._table = table
        self._spelling = spelling
        self.endings: dict[int, int] = {}
        self._ending_bytes_of: dict[Place, bytes] = {}
        # The tokens without a line feed, by the number of the place that `_representative` returns.
        self._parts_within_line: dict[int, ReachPart] = {}
        self._reaches: dict[int, TokenReach] = {}
        # The bytes of the arrays of all parts. Arrays with equal bytes share one entry; see `_share_memory`.
        self._contents: dict[bytes, bytes] = {}

    def explore(self, number: int) -> TokenReach:
        """Return all tokens that can follow a place, found in one walk over both tries, or in the results of
        an earlier call.

        Places that differ in how many lines may follow share the result if no token is long enough to see the
        difference.

        number: number of the place in the byte table.

        The `number` of the result may be that of another place with the same tokens. Places are added to the
        table.
        """
        place = bound_lines(self._table.place(number), self._max_lines_started + 2)
        number = self._table.number(place)
        if number not in self._reaches:
            parts = self._tokens_within_line(place), self._walk(self._across_lines, number)
            self._reaches[number] = TokenReach(
                number=number,
                size=self._size,
                parts=parts,
                roomy=max(_largest(part.costs) for part in parts) + 1,
                steps=_steps([part.needs for part in parts], MAX_TITLE_BYTES),
                word_steps=_steps([part.words for part in parts], MAX_TITLE_WORDS),
            )
        return self._reaches[number]

    def ending(self, number: int) -> int:
        """Return the number of tokens of the shortest ending from a place; 0 at the end.

        Returns UNREACHABLE_TOKENS if the vocabulary cannot spell the ending.

        number: number of the place in the byte table.

        The result is cached in `endings`.
        """
        if number not in self.endings:
            self.endings[number] = self._spelling.count(
                self._ending_bytes(self._table.place(number)), UNREACHABLE_TOKENS
            )
        return self.endings[number]

    def _ending_bytes(self, place: Place) -> bytes:
        """Return the bytes that lead to the end if the first edge is followed from every place
        (`language.onward`). Return b"" at the end.

        place: the place where the ending begins.

        The result is cached for each place on the way.
        """
        if isinstance(place, language.Done):
            return b""
        if place not in self._ending_bytes_of:
            byte, to = language.onward(self._table.rules, place)
            self._ending_bytes_of[place] = bytes([byte]) + self._ending_bytes(to)
        return self._ending_bytes_of[place]

    def _tokens_within_line(self, place: Place) -> ReachPart:
        """Return the tokens without a line feed that can follow a place.

        Places that differ only in the line of a title share one result, see `_representative`.

        place: the place before the token.

        The result is cached.
        """
        number = self._table.number(_representative(place))
        if number not in self._parts_within_line:
            self._parts_within_line[number] = self._walk(self._within_line, number)
        return self._parts_within_line[number]

    def _walk(self, trie: Trie, number: int) -> ReachPart:
        """Walk a trie level by level from one place, for all its tokens at once, and return the tokens that
        can follow the place.

        Nodes that the grammar forbids are dropped at each level. The result has no tokens if none can follow.

        trie: the tokens to try.
        number: number of the place before the tokens.

        A trie without levels gives no tokens. Places are added to the table.
        """
        table = self._table
        found: list[TokenEnds] = []
        nodes = np.arange(len(trie[0].byte) if trie else 0, dtype=np.int32)
        places = np.full(len(nodes), number, dtype=np.int32)
        words = np.zeros(len(nodes), dtype=np.int32)
        for level in trie:
            before = places
            places = table.after(places, level.byte[nodes])
            words = words + (table.rank[places] > table.rank[before])
            alive = places != DEAD
            nodes = nodes[alive]
            places = places[alive]
            words = words[alive]
            if not len(nodes):
                break
            found.append(_tokens_at(level, nodes, places, words))
            first = level.children[nodes]
            counts = level.children[nodes + 1] - level.children[nodes]
            nodes = ranges(first, counts)
            places = np.repeat(places, counts)
            words = np.repeat(words, counts)
        return self._with_needs(
            number, TokenEnds(*(np.concatenate([_NONE, *each]) for each in _columns(found)))
        )

    def _with_needs(self, number: int, found: TokenEnds) -> ReachPart:
        """Return tokens with their costs and needs. Tokens are left out if the vocabulary can spell no ending
        after them, or if no title has enough bytes or words for them.

        number: number of the place before the tokens.
        found: the tokens that the grammar allows, regardless of budgets.

        In a title without counts, a token needs its bytes before the first line feed, and the bytes that the
        title must still have after the token before it may end (`ByteTable.owed`). At other places, tokens
        need no bytes. If more than the fraction _MIN_DENSE_SHARE of the
        vocabulary can follow, the part has an entry for every token.
        """
        table = self._table
        size = len(table.places)
        costs = np.full(size, UNREACHABLE_TOKENS, dtype=np.int16)
        planned = np.zeros(size, dtype=np.bool_)
        owed = np.zeros(size, dtype=np.int32)
        for end in np.flatnonzero(np.bincount(found.places, minlength=1)).tolist():
            costs[end] = self.ending(end)
            planned[end] = table.planned[end]
            owed[end] = table.owed[end] if table.open[end] else 0
        needs = (
            found.line_bytes + owed[found.places] if table.open[number] else np.zeros_like(found.line_bytes)
        )
        possible = costs[found.places] < UNREACHABLE_TOKENS
        possible &= (needs <= MAX_TITLE_BYTES) & (found.words <= MAX_TITLE_WORDS)
        places = found.places[possible]
        tokens = found.tokens[possible]
        part = ReachPart(
            tokens=tokens,
            costs=costs[places],
            needs=needs[possible].astype(np.uint8),
            words=found.words[possible].astype(np.uint8),
            planned=planned[places],
        )
        return self._share_arrays(
            self._to_dense(part) if len(tokens) > _MIN_DENSE_SHARE * self._size else part
        )

    def _to_dense(self, part: ReachPart) -> ReachPart:
        """Return a part with an entry for every token of the vocabulary. If some of its tokens belong to
        plans and others do not, the part is returned unchanged.

        part: tokens with their costs and needs; at least one token.

        The result's `planned` is one bool. Tokens that cannot follow cost UNREACHABLE_TOKENS.
        """
        assert part.tokens is not None
        assert not isinstance(part.planned, bool)
        if part.planned.any() != part.planned.all():
            return part
        costs = np.full(self._size, UNREACHABLE_TOKENS, dtype=np.int16)
        needs = np.zeros(self._size, dtype=np.uint8)
        words = np.zeros(self._size, dtype=np.uint8)
        costs[part.tokens] = part.costs
        needs[part.tokens] = part.needs
        words[part.tokens] = part.words
        return ReachPart(None, costs, needs, words, bool(part.planned.all()))

    def _share_arrays(self, part: ReachPart) -> ReachPart:
        """Return an equal part, whose arrays use the same memory as equal arrays of other parts. The arrays
        are read-only.

        The parts of different lines differ at most in the costs. With a vocabulary of 152 thousand tokens,
        all parts have 21 MB of arrays, and 8 MB of different ones.

        part: tokens with their costs and needs.
        """
        return replace(
            part,
            tokens=None if part.tokens is None else self._share_memory(part.tokens),
            costs=self._share_memory(part.costs),
            needs=self._share_memory(part.needs),
            words=self._share_memory(part.words),
            planned=part.planned if isinstance(part.planned, bool) else self._share_memory(part.planned),
        )

    def _share_memory(self, array: NDArray[Number]) -> NDArray[Number]:
        """Return an equal, read-only array. All results with the same bytes use the same memory.

        array: [k], of any type.
        """
        content = array.tobytes()
        return np.frombuffer(self._contents.setdefault(content, content), dtype=array.dtype)


def bound_lines(place: Place, max_following: int) -> Place:
    """Return a place with the number of lines that may follow its line cut to `max_following`.

    With max_following=2, a place of line 3 of 16 becomes the same place of line 3 of 5. Places without a
    line, at the end and in a direct answer, are returned unchanged.

    place: any place of the automaton.
    max_following: the largest number of lines that may follow.

    A place whose line has no more than `max_following` lines after it is equal to the result.
    """
    if isinstance(place, Literal):
        return replace(place, then=bound_lines(place.then, max_following))
    if isinstance(place, Done | language.Direct):
        return place
    line = place.line
    return replace(place, line=NumberedLine(line.number, min(line.last, line.number + max_following)))


def _representative(place: Place) -> Place:
    """Return a place that the same tokens without a line feed can follow, with the same costs and needs. It
    is the same for as many lines as possible.

    In a title, these tokens depend on the line only through the length of the ending. The same holds for
    determined bytes (`Literal`) that lead to a title. Other places are returned unchanged.

    place: any place of the automaton.
    """
    if isinstance(place, Literal):
        return replace(place, then=_representative(place.then))
    if isinstance(place, Title):
        return replace(place, line=NumberedLine(1, 1))
    if isinstance(place, ListTitle):
        return replace(place, line=_representative_line(place.line))
    return place


def _representative_line(line: NumberedLine) -> NumberedLine:
    """Return a line whose titles have endings of the same lengths, the same for as many lines as possible.

    The shortest ending from a list's title writes a second line if the list has only one, and one more line
    feed if a further line may follow.

    line: a line of a list.

    The result is line 1 of 1 for the last line of any list.
    """
    if line.number >= line.last:
        return NumberedLine(1, 1)
    number = min(line.number, 2)
    return NumberedLine(number, number + min(line.last - line.number, 3 - number))


# No tokens, so that a walk that finds none can be concatenated.
_NONE = np.zeros(0, dtype=np.int32)


class TokenEnds(NamedTuple):
    """Tokens that a walk through a trie has found, with the places after them.

    tokens: [k], token ids.
    places: [k], number of the place after each token.
    line_bytes: [k], number of bytes of each token before its first line feed.
    words: [k], words of a list's title that each token uses up before its first line feed.
    """

    tokens: Ints
    places: Ints
    line_bytes: Ints
    words: Ints


def _tokens_at(level: TrieLevel, nodes: Ints, places: Ints, words: Ints) -> TokenEnds:
    """Return the tokens that end at some nodes of a level. Empty if none does.

    level: the level of the trie.
    nodes: [n], numbers of nodes of the level; at least one.
    places: [n], number of the place after each node's beginning.
    words: [n], how many words of a list's title each node's beginning uses up.

    The tokens are in the order of the nodes; a node at which several tokens end yields all of them.
    """
    first = level.ends[nodes]
    counts = level.ends[nodes + 1] - first
    found = ranges(first, counts)
    return TokenEnds(
        level.tokens[found], np.repeat(places, counts), level.line_bytes[found], np.repeat(words, counts)
    )


def _columns(levels: list[TokenEnds]) -> list[list[Ints]]:
    """Return for each of the four fields of `TokenEnds` the list of its arrays, one for each level. The four
    lists are empty if there are no levels.

    levels: the tokens found at each level of a trie.
    """
    return [[level[field_number] for level in levels] for field_number in range(4)]


def _largest(costs: NDArray[np.int16]) -> int:
    """Return the largest cost of a token that can follow; 0 if none can.

    costs: [k], number of tokens of the shortest ending after each token, or UNREACHABLE_TOKENS.
    """
    return int(costs[costs < UNREACHABLE_TOKENS].max(initial=0))


def _steps(needs: list[NDArray[np.uint8]], max_number: int) -> tuple[int, ...]:
    """Return for each number that may be left, 0 .. `max_number`, the largest need that it covers, or 0.

    Needs of 2 and 5 and a `max_number` of 6 give (0, 0, 2, 2, 2, 5, 5).

    needs: arrays of the bytes, or words, that tokens need.
    max_number: the largest number of bytes, or words, that a title may have left.
    """
    distinct = np.unique(np.concatenate([*needs, np.zeros(1, dtype=np.uint8)]))
    numbers_left = np.arange(max_number + 1)
    return tuple(distinct[np.searchsorted(distinct, numbers_left, side="right") - 1].tolist())
