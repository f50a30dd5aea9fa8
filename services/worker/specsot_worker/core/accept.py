"""Verification of one sequence: accepts tree nodes along the target tokens and detects the sequence's end.

Also holds what the last stage remembers of a decoding sequence, the grammar masks for the nodes of a tree,
and the counter-based random numbers of sampling.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import overload

import numpy as np

from specsot.core.frames import End, Opening, Outcome
from specsot.core.tree import Tree, accept, shape_of
from specsot.grammar import LONGEST_FORCED_RUN, Grammar, IsolatedGrammar, SpellingHabits
from specsot_worker.core.pipeline import place_of
from specsot_worker.core.soft_end import SoftEndRule

_DRAW = struct.Struct("<QQQ")
_RULE = b"specsot-draw-v1"
_WORD = 2**64 - 1


# Nodes of one depth share a key, so it is cached. The size of the cache is untuned.
@lru_cache(4096)
def draw_key(seed: int, ordinal: int, position: int) -> int:
    """Return 53 random bits, as many as a float64 holds, for one token to be drawn.

    The bits depend on the three arguments alone, so the drawn token depends neither on the batch nor on the
    tree.

    seed: Seed of the request. Any integer; its lowest 64 bits count.
    ordinal: Number of the branch within its request, at least 0.
    position: Position in the sequence at which the drawn token will stand, at least 0.

    Raises struct.error for a negative ordinal or position.
    """
    digest = hashlib.blake2b(_DRAW.pack(seed & _WORD, ordinal, position), digest_size=8, person=_RULE)
    return int.from_bytes(digest.digest(), "little") >> 11


def uniform(key: int, bit_value: int) -> float:
    """Return a random number in [0, 1) with 53 bits, by splitmix64 (Steele 2014). Equal arguments give the
    same number.

    key: Random bits of the draw, from `draw_key`.
    bit_value: Value of the bit of the token id that is being drawn, such as 4 for bit 2. Each bit has a
        random number of its own.
    """
    word = key + bit_value * 0x9E3779B97F4A7C15 & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return ((word ^ word >> 31) >> 11) * 2.0**-53


class TokenCounts:
    """Counter of how often each token occurs in one sequence. Tokens of the prompt are present with a count
    of 0.

    For example:

        # TokenCounts([7, 8]), then add(8) twice: counts() -> {7: 0, 8: 2}
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        """Start with the tokens of the prompt, each with a count of 0.

        prompt: Token ids. Repeated ids count once. Empty: nothing is counted yet.
        """
        self._counts = dict.fromkeys(prompt, 0)

    def add_prompt(self, tokens: Iterable[int]) -> None:
        """Add tokens of the prompt: each token id that is not present yet gets a count of 0; counts that
        exist stay.

        tokens: Token ids.
        """
        for token in tokens:
            self._counts.setdefault(token, 0)

    def add(self, token: int) -> None:
        """Count one generated token.

        token: Id of the token.
        """
        self._counts[token] = self._counts.get(token, 0) + 1

    def counts(self, extra_tokens: Iterable[int] = ()) -> dict[int, int]:
        """Return a copy of the counts by token id, as if some more tokens had been generated.

        extra_tokens: Ids of the tokens to count in addition: the drafted tokens on the path to a tree node.
            Empty: only what has been recorded counts. The counter itself does not change.
        """
        counts = self._counts.copy()
        for token in extra_tokens:
            counts[token] = counts.get(token, 0) + 1
        return counts


@dataclass(slots=True)
class DecodeState:
    """What the last stage remembers of a decoding sequence.

    opening: What every stage knows about the sequence.
    grammar: The grammar that constrains the sequence, or None.
    habits: How the base model usually spells what grammars force. All sequences of the verifier share it.
    history: Counts of the sequence's tokens, for penalties. None if no penalty is asked for.
    tokens: Every token that the sequence has generated, including the newest, which has not been fed yet.
    state: State of the grammar after those tokens. None without a grammar, and if the grammar does not allow
        them.
    retried: True if the logits of the newest token were not finite and the token is being fed once more.
    soft_end: Ends the sequence after a sentence, once it is nearly long enough. None if it has no soft end.
    stop_ids: The opening's `stop_ids` as a set, because every step looks up the tokens of every sequence.
    processed: True if penalties or biases change the logits before a token is chosen.
    greedy: True if the target tokens are the argmax of unchanged logits, except where that is one of the
        `lowered` tokens.
    lowered: The biased tokens of a greedy sequence, whose biases are all negative. An argmax that is none of
        them is also the argmax with the biases. Empty for other sequences.
    bars: True if `barred_tokens` may return tokens.
    takes_argmax: True if every target of the sequence is the argmax of the unchanged logits, except where a
        grammar mask excludes it: the sequence is greedy, and neither biases nor barred tokens change it.
    order: The sequence's place among the trees of a frame, see `place_of`.
    place: The same place, if the sequence's next tree is always the drafter's tree for its newest token. None
        if it has no drafter, or if it has a grammar and is not greedy.
    """

    opening: Opening
    grammar: Grammar | None = None
    habits: SpellingHabits = field(default_factory=SpellingHabits)
    history: TokenCounts | None = None
    tokens: list[int] = field(default_factory=list)
    state: object | None = None
    retried: bool = False
    soft_end: SoftEndRule | None = None
    stop_ids: frozenset[int] = field(init=False)
    processed: bool = field(init=False)
    greedy: bool = field(init=False)
    lowered: frozenset[int] = field(init=False)
    bars: bool = field(init=False)
    takes_argmax: bool = field(init=False)
    order: tuple[int, int] = field(init=False)
    place: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        """Derive the fields that depend on the opening alone, and start the grammar if there is one.

        A drafted sequence has a `place` until a grammar takes it away, see `set_grammar`.
        """
        self.stop_ids = frozenset(self.opening.stop_ids)
        sampling = self.opening.sampling
        biases = sampling.logit_bias
        self.processed = sampling.penalises or bool(biases)
        only_lowers = not sampling.penalises and all(bias <= 0 for _, bias in biases)
        self.greedy = sampling.temperature <= 0 and only_lowers
        self.lowered = frozenset(token for token, _ in biases) if self.greedy else frozenset()
        self.bars = self.opening.min_tokens > 0 or bool(self.opening.excluded_first)
        self.takes_argmax = self.greedy and not (self.lowered or self.bars)
        self.order = place_of(self.opening)
        self.place = self.order if self.opening.drafted else None
        if self.grammar:
            self.set_grammar(self.grammar)

    def set_grammar(self, grammar: Grammar) -> None:
        """Constrain the sequence by a grammar from now on. The grammar first reads the tokens that the
        sequence has generated so far (in a previous epoch, for example).

        grammar: The compiled grammar. If it does not allow the tokens so far, `state` becomes None.

        For a sequence that is not greedy, `place` becomes None.
        """
        self.grammar = grammar
        self.state = grammar.start()
        self.place = self.place if self.greedy else None
        for token in self.tokens:
            self.state = None if self.state is None else grammar.advance(self.state, token)

    @property
    def failure(self) -> str | None:
        """The reason why the grammar has failed with an error, so that the sequence must end whatever its
        logits are. None if it has not failed, or if there is no grammar.
        """
        return self.grammar.failure if isinstance(self.grammar, IsolatedGrammar) else None

    @property
    def remaining(self) -> int:
        """Number of tokens that the sequence may still generate before it reaches its limit. It is 0 or less
        at the limit.
        """
        return self.opening.limit - len(self.tokens)

    def barred_tokens(self, num_ahead: int = 0) -> tuple[int, ...]:
        """Return the ids of the tokens that the next token must not be: the stop tokens as long as the
        request's `min_tokens` forbids them, and for the first generated token also the opening's
        `excluded_first`. Return () if every token is allowed; then every token after it is allowed too.

        num_ahead: Number of drafted tokens that count as generated already: the depth of a tree node. 0: the
            token after the newest one is meant.

        For example:

            # stop_ids (2,), min_tokens 2, excluded_first (5,):
            # nothing generated -> (2, 5); one token generated -> (2,); two -> ()
        """
        num_generated = len(self.tokens) + num_ahead
        stop_ids = self.opening.stop_ids if num_generated < self.opening.min_tokens else ()
        return stop_ids if num_generated else (*stop_ids, *self.opening.excluded_first)

    def will_continue(self, paused: bool) -> bool:
        """Return whether the next step feeds exactly the one token that this step generates, unless that
        token ends the sequence.

        This is False for sequences that ask for log-probabilities, and for drafted sequences while drafting
        is active. Of a sequence with a grammar, see also `is_forced_after`.

        paused: True while drafting is paused or resuming.
        """
        opening = self.opening
        return opening.logprobs is None and (paused or not opening.drafted)

    def is_forced_after(self, targets: Sequence[int | None]) -> bool:
        """Return whether the grammar leaves no choice about the token that follows these target tokens, so
        that it is fed together with the last of them. Return False without a grammar.

        targets: Ids of the next target tokens, in order. None: the logits are not finite, or acceptance does
            not come so far; then the result is False.
        """
        state = self.state
        if self.grammar is None:
            return False
        for token in targets:
            state = None if token is None or state is None else self.grammar.advance(state, token)
        return state is not None and bool(self.habits.forced(self.grammar, state, 1))

    def write(self, tokens: tuple[int, ...]) -> End | None:
        """Append generated tokens up to and including the first that ends the sequence, and advance grammar
        and counts. Return why the sequence ends. Return None if it does not end, or if there are no tokens.
        Tokens after the one that ends the sequence are dropped.

        tokens: Ids of the accepted tokens, in order.

        For example:

            # stop_ids (2,), write((5, 2, 9)) -> tokens grow by [5, 2], returns End.STOP

        The reasons are those of `_end_at`. A grammar that does not allow a token ends the sequence with
        FAILED, after that token was appended.
        """
        left = self.opening.limit - len(self.tokens)
        check_each = self.grammar or self.history or len(tokens) >= left
        if not check_each and self.stop_ids.isdisjoint(tokens):
            self.tokens += tokens
            return None
        for token in tokens:
            self.tokens.append(token)
            if self.history:
                self.history.add(token)
            if end := self._end_at(token):
                return end
        return None

    def forced(self) -> tuple[int, ...]:
        """Return the ids of the next tokens that the grammar leaves no choice about, as far as feeding them
        at once is profitable: at most LONGEST_FORCED_RUN, and none after the last token that may be
        generated. Return () without a grammar, or if the next token is not forced. No drafter is needed.
        """
        if self.grammar is None:
            return ()
        return self.habits.forced(self.grammar, self.state, min(self.remaining - 1, LONGEST_FORCED_RUN))

    def read_prompt(self, start: int, tokens: tuple[int, ...]) -> None:
        """Record prompt tokens that have passed the stages. Nothing happens if there are none.

        After a repair, the last `opening.generated` tokens of the prompt were generated by this sequence
        itself. They count as generated.

        start: Position of the first of the tokens in the sequence.
        tokens: Their ids.

        For example:

            # prompt 10, generated 3: read_prompt(5, 5 tokens) -> 2 belong to the prompt, 3 were generated

        A reason to end that the generated tokens contain is ignored here.
        """
        num_prompt = max(self.opening.prompt - self.opening.generated - start, 0)
        if self.history:
            self.history.add_prompt(tokens[:num_prompt])
        self.write(tokens[num_prompt:])

    def _end_at(self, token: int) -> End | None:
        """Return why the sequence ends with its newest token, or None if it continues. The grammar, if any,
        reads the token.

        token: Id of the newest token, which `tokens` contains already.

        The first reason that applies is returned: STOP for a stop id, FAILED if the grammar does not allow
        the token, GRAMMAR if the grammar is finished, LENGTH if the sequence is at its limit.

        For a grammar, the spelling of the token is recorded in `habits`. A stop id is not read by the
        grammar. None is returned if no reason applies.
        """
        if token in self.stop_ids:
            return End.STOP
        if self.grammar:
            self.habits.record(self.grammar, self.state, token)
            self.state = self.grammar.advance(self.state, token)
            if self.state is None:
                return End.FAILED
            if self.grammar.finished(self.state):
                return End.GRAMMAR
        return End.LENGTH if self.remaining <= 0 else None


def accept_prompt(state: DecodeState, target: int | None) -> Outcome:
    """Record the first token after a prompt, and return the outcome of draft round 0.

    state: What is remembered of the sequence. The token is appended to it.
    target: Id of the target token after the prompt. None if its logits are not finite; the outcome is then
        FAILED and has no tokens.

    If the token ends the sequence, the outcome says why and has no forced tokens.
    """
    if target is None:
        return Outcome(state.opening.sequence, 0, (), (), End.FAILED)
    end = state.write((target,))
    return Outcome(state.opening.sequence, 0, (), (target,), end, forced=() if end else state.forced())


def accept_tree(
    state: DecodeState, draft_round: int, tree: Tree, targets: list[int | None], draft_paused: bool = False
) -> Outcome:
    """Accept the nodes along the target tokens, append their tokens and the bonus token to the sequence, and
    return the outcome.

    state: What is remembered of the sequence. Tokens are appended to it.
    draft_round: Number of the draft round to which the tree belongs.
    tree: The verified tree: token id and parent of each node. Node 0 is the root.
    targets: Target token id at each node. None: the node's logits are not finite, or acceptance does not
        reach the node.
    draft_paused: True if the sequence is drafted, but drafting was paused or resuming for this frame.

    For example:

        # tokens [a b c d], parents [0 0 1 0], targets [b c x -] -> accepted (0, 1, 2), tokens (b, c, x)

    If a token ends the sequence, the tokens after it are cut off, and as many accepted nodes remain as
    tokens.

    If the logits of the last accepted draft are not finite, that draft is not accepted: its token becomes the
    bonus token and is fed as the next root. If the logits of the root are not finite, a draft may have spoilt
    them: nothing is accepted, and the root is fed once more, alone. If that fails too, the outcome is FAILED.

    The FAILED outcome has the root as its only accepted node and no tokens. The outcome for feeding the root
    again has no accepted nodes and no tokens. If the sequence ends, the outcome has no forced tokens.
    """
    sequence = state.opening.sequence
    accepted = accept(tree, targets)
    # The token of an accepted node is the target at its parent, so only the last target may be None.
    tokens = tuple([token for node in accepted if (token := targets[node]) is not None])
    accepted = accepted[: len(tokens)]
    if not tokens:
        first_failure = not state.retried
        state.retried = True
        if first_failure:
            return Outcome(sequence, draft_round, (), (), draft_paused=draft_paused)
        return Outcome(sequence, draft_round, (0,), (), End.FAILED, draft_paused=draft_paused)
    state.retried = False
    num_previous = len(state.tokens)
    if end := state.write(tokens):
        tokens = tuple(state.tokens[num_previous:])
        accepted = accepted[: len(tokens)]
    forced = () if end or state.grammar is None else state.forced()
    return Outcome(sequence, draft_round, accepted, tokens, end, (), forced, draft_paused)


Masks = Sequence[np.ndarray | None]


def grammar_masks(tree: Tree, state: DecodeState) -> Masks:
    """Return the mask of each node of a tree: bool [vocab], True for tokens that may follow the node, or None
    if every token may. The masks are built when they are read.

    tree: The tree. The last token of a prompt is a tree of one node.
    state: What is remembered of the tree's sequence, before the tree is accepted.

    Return () without a grammar, or if the grammar does not allow the tokens so far.

    The masks also bound what may follow by the number of tokens that the sequence may still generate.
    """
    if state.grammar is None or state.state is None:
        return ()
    return TreeMasks(state.grammar, state.state, state.remaining, tree)


class TreeMasks(Masks):
    """Sequence of the grammar masks of a tree's nodes. Each mask is made when its node is looked at, because
    acceptance reaches only few nodes.

    The grammar's state after the root is given, because the root has been generated. The states of other
    nodes follow from their parents' states.
    """

    def __init__(self, grammar: Grammar, root: object, remaining: int, tree: Tree) -> None:
        """Start without masks.

        grammar: The grammar of the sequence.
        root: The grammar's state after the root's token.
        remaining: Number of tokens that may follow the root.
        tree: The tree: token id and parent of each node.

        States and masks are computed when they are asked for, not here.
        """
        self._grammar = grammar
        self._tree = tree
        # How many tokens may follow each node.
        self._remaining = [remaining - depth for depth in shape_of(tree.parents).depths]
        self._states: dict[int, object | None] = {0: root}
        self._masks: dict[int, np.ndarray | None] = {}

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._tree)

    @overload
    def __getitem__(self, index: int) -> np.ndarray | None: ...
    @overload
    def __getitem__(self, index: slice) -> Masks: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Masks | None:
        """Return the mask of a node, bool [vocab], or None if every token may follow it. For a slice, return
        the list of the masks. A mask is built when it is first read.

        index: Number of a node, or a slice of node numbers. Negative numbers count from the end.

        Raises IndexError if the tree has no node of that number.
        """
        if isinstance(index, slice):
            return [self[node] for node in range(*index.indices(len(self)))]
        node = range(len(self))[index]
        if node not in self._masks:
            self._masks[node] = self._make_mask(node)
        return self._masks[node]

    def allows(self, node: int, token: int) -> bool:
        """Return whether a token may follow a node, without building the node's mask. Return True if the
        grammar does not constrain the token after the node, and False if it forbids the token there.

        node: Number of the node.
        token: Token id.
        """
        state = self._constraining_state(node)
        return state is None or self._grammar.allows(state, token, self._remaining[node])

    def _make_mask(self, node: int) -> np.ndarray | None:
        """Build the mask of a node: bool [vocab], or None if every token may follow it.

        node: Number of the node.
        """
        state = self._constraining_state(node)
        return None if state is None else self._grammar.mask(state, self._remaining[node])

    def _constraining_state(self, node: int) -> object | None:
        """Return the grammar's state after a node, if it constrains the next token. Return None if every
        token is allowed: the grammar is finished, or does not allow the node itself, or no token may follow
        the node.

        node: Number of the node.
        """
        state = self._state(node)
        unconstrained = state is None or self._remaining[node] < 1 or self._grammar.finished(state)
        return None if unconstrained else state

    def _state(self, node: int) -> object | None:
        """Return the grammar's state after a node. Return None if the grammar does not allow the tokens up to
        the node. States are cached.

        node: Number of the node.

        `node` is the number of the node; the state of node 0 is that after the root.
        """
        if node not in self._states:
            parent_state = self._state(self._tree.parents[node])
            token = self._tree.tokens[node]
            self._states[node] = None if parent_state is None else self._grammar.advance(parent_state, token)
        return self._states[node]
