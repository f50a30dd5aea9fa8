"""The open sequences as the drafter knows them: tokens, grammar states, and how much each may still write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specsot.core.frames import FeatureBatch, Opening
from specsot.core.vocabulary import Vocabulary
from specsot.errors import NotFound
from specsot.grammar import Grammar, IsolatedGrammar, Prose, SentenceEnds, grammar_of, sentence_ends
from specsot.params import MAX_TOKENS


@dataclass(slots=True)
class GrammarState:
    """The grammar of one sequence, and the state after the newest token.

    grammar: The compiled grammar that constrains the sequence.
    state: The grammar's state after the newest token. None after a token that the grammar forbids.
    """

    grammar: Grammar
    state: Any

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance the state by tokens that the sequence wrote itself. Once the state is None, it stays None.

        tokens: Token ids, in order.

        `state` becomes None at the first token that the grammar forbids. Without tokens nothing changes.
        """
        for token in tokens:
            if self.state is not None:
                self.state = self.grammar.advance(self.state, token)


def own_tokens(opening: Opening, first: int, tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens that the sequence wrote itself, out of consecutive tokens. Empty if all belong to the
    prompt.

    opening: How the sequence was opened. `opening.prompt` counts also the tokens that the sequence wrote in
        an earlier epoch, `opening.generated`.
    first: Position of the first of the tokens.
    tokens: The token ids at positions first, first + 1, ...

    For example:

        # prompt 10, generated 3, first 5: the sequence's own tokens begin at position 7 -> tokens[2:]

    If all tokens are the sequence's own, all are returned.
    """
    return tokens[max(opening.prompt - opening.generated - first, 0) :]


@dataclass(slots=True)
class DraftSequence:
    """What the drafter knows of one sequence.

    opening:   How the sequence was opened: what every stage knows about it.
    tokens:    Ids of all known tokens, prompt and generated ones, in order. The newest one is the root of the
               next tree: the base model has not processed that token yet.
    committed: Number of tokens that the base model has processed.
    compiling: Future of the sequence's grammar while the grammar is being compiled. None if it is compiled,
               or if there is none.
    sentences: Finds the ends of sentences. None if the sequence has no soft end.
    id:        Id of the sequence.
    end:       Length at which the sequence reaches its limit, prompt included.
    family:    The family, which all sequences of one request share. If the opening names no family, it is the
               id of the sequence.
    _grammar_state: The compiled grammar with its state. None before the grammar is compiled, or without one.
    _prose:    What the sequence has written itself, as far as it was read.
    _num_read: Number of tokens, of `tokens`, that were read into `_prose`.
    """

    opening: Opening
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    compiling: Future[Grammar] | None = None
    sentences: SentenceEnds | None = None
    id: int = field(init=False)
    end: int = field(init=False)
    family: int = field(init=False)
    _grammar_state: GrammarState | None = None
    _prose: Prose = field(default_factory=Prose)
    _num_read: int = 0

    def __post_init__(self) -> None:
        """Derive the id, the end and the family from the opening."""
        opening = self.opening
        self.id = opening.sequence
        self.end = opening.limit + opening.prompt - opening.generated
        self.family = opening.sequence if opening.family is None else opening.family

    @property
    def grammar_state(self) -> GrammarState | None:
        """The grammar with its state after the newest token. None if the sequence has no grammar, or if the
        grammar is not compiled yet.
        """
        if self.compiling and self.compiling.done():
            self.set_grammar(IsolatedGrammar(self.compiling.result))
        return self._grammar_state

    def set_grammar(self, grammar: Grammar) -> None:
        """Constrain the sequence by a grammar, and apply the grammar to all that was written so far.

        grammar: The compiled grammar.

        `compiling` becomes None. If the grammar forbids what was written so far, its state is None.
        """
        self._grammar_state = GrammarState(grammar, grammar.start())
        self.compiling = None
        self._grammar_state.advance(own_tokens(self.opening, 0, self.tokens))

    @property
    def root(self) -> int | None:
        """Id of the token that the next tree grows from. None while the prompt is not complete."""
        return self.tokens[-1] if len(self.tokens) > self.committed else None

    @property
    def remaining(self) -> int:
        """Number of tokens that the sequence may still write after its root; 0 or less at its limit."""
        return self.end - self.committed - 1

    @property
    def written(self) -> int:
        """Number of tokens that the sequence has written itself, the root included."""
        return self.opening.limit - self.remaining

    def read_prose(self) -> Prose:
        """Return what the sequence has written itself, for `sentences`. Each token is read once. Call it only
        for a sequence with a soft end, whose `sentences` is not None.

        Tokens of the prompt are not read. Without such tokens, a new
        `Prose` is returned.
        """
        assert self.sentences is not None
        for token in own_tokens(self.opening, self._num_read, self.tokens[self._num_read :]):
            self._prose = self.sentences.advance(self._prose, token)
        self._num_read = len(self.tokens)
        return self._prose

    def max_tokens(self, positions: int) -> int:
        """Return the maximum number of tokens that the sequence may have in a draft model. A sequence with an
        attention window is not bounded by the positions of the model.

        positions: Number of positions that the model supports.
        """
        return MAX_TOKENS if self.opening.window else positions

    def observe(self, feature_batch: FeatureBatch) -> bool:
        """Append the committed tokens of a feature batch, and the bonus token after them, and return True. If
        a batch was missed, or if this one has no tokens, change nothing and return False.

        feature_batch: Committed tokens of this sequence. The batch continues the known tokens if it begins
            where the sequence's committed tokens end, and if its first token is the known root or the root is
            not known.

        For example:

            # known tokens [a b c], 2 committed; batch with start 2, tokens (c, d), bonus e
            # -> tokens [a b c d e], 4 committed, root e

        A batch without a bonus token leaves the sequence without a root. If a grammar is compiled, its state
        advances by the new tokens that the sequence wrote itself.
        """
        tokens = feature_batch.tokens
        known = self.tokens
        committed = self.committed
        if not tokens or feature_batch.start != committed:
            return False
        first = len(known)
        if first == committed:
            known += tokens
        elif known[-1] == tokens[0]:
            known += tokens[first - committed :]
        else:
            return False
        if feature_batch.bonus is not None:
            known.append(feature_batch.bonus)
        self.committed = committed + len(tokens)
        if self._grammar_state:
            self._grammar_state.advance(own_tokens(self.opening, first, known[first:]))
        return True


class DraftSequences:
    """The sequences of one epoch. A sequence is dropped once a feature batch of it was missed.

    find: Returns what is known of a sequence, by its id. None if it is unknown.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        """Start without sequences.

        vocabulary: Bytes of each token, to compile grammars with. None: grammars are ignored.
        """
        self._vocabulary = vocabulary
        self._sentences = sentence_ends(vocabulary) if vocabulary else None
        self._sequences: dict[int, DraftSequence] = {}
        # Ids of the sequences that decode and are drafted for. The others are prefixes, mostly.
        self._drafted = set[int]()
        self.find: Callable[[int], DraftSequence | None] = self._sequences.get

    @property
    def drafted(self) -> int:
        """Number of sequences that decode and are drafted for."""
        return len(self._drafted)

    def open(self, opening: Opening) -> DraftSequence:
        """Follow a sequence from its start or from its fork, and return it.

        opening: What every stage knows about the sequence.

        Raises NotFound if the source of the fork is not known up to the fork.

        A fork of length 0 counts as no fork. The sequence is drafted without its grammar until that is
        compiled, and without a vocabulary always. A sequence of the same id is replaced.
        """
        opened = DraftSequence(opening)
        if opening.fork and opening.fork.length:
            source = self.find(opening.fork.sequence)
            if source is None or source.committed < opening.fork.length:
                raise NotFound(f"sequence {opening.sequence} forks what is not followed so far")
            opened.committed = opening.fork.length
            opened.tokens = source.tokens[: opened.committed]
        opened.compiling = grammar_of(self._vocabulary, opening, guided=False) if self._vocabulary else None
        opened.sentences = self._sentences if opening.soft_end else None
        self.close(opening.sequence)
        self._sequences[opening.sequence] = opened
        if opening.drafted and opening.decodes:
            self._drafted.add(opening.sequence)
        return opened

    def observe(self, feature_batches: Sequence[FeatureBatch]) -> list[int]:
        """Append committed tokens. Drop sequences of which a batch was missed, and return their ids; [] if
        none was. Batches of unknown sequences are ignored.

        feature_batches: The batches of one message.

        A batch without tokens also counts as missed.
        """
        missed: list[int] = []
        for feature_batch in feature_batches:
            if (known := self._sequences.get(feature_batch.sequence)) is None:
                continue
            if not known.observe(feature_batch):
                missed.append(feature_batch.sequence)
                self.close(feature_batch.sequence)
        return missed

    def close(self, sequence: int) -> None:
        """Forget a sequence. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._sequences.pop(sequence, None)
        self._drafted.discard(sequence)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences. 0 if either is empty.

    first: Token ids.
    second: Token ids.

    If one sequence begins with the other, the length is that of the shorter one.
    """
    for index, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return index
    return min(len(first), len(second))
