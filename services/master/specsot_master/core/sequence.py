"""One sequence: the opening that stage 0 receives, its lease, its token log, and its detokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specsot.core.frames import End, Fork, Logprob, Open, Opening, Outcome
from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.errors import WireError
from specsot.events import Candidate, TokenLogprobs
from specsot.params import Ask, HeadImportance, HeadWindows, Window
from specsot_master.core.limits import least_of
from specsot_master.core.plans.text_pieces import TextPiece


class SequenceFactory:
    """Creates the openings of all sequences of one engine. Sequence ids count up from 1 and are never
    reused.
    """

    def __init__(
        self,
        end_ids: tuple[int, ...],
        heads: HeadWindows | None = None,
        importance: HeadImportance | None = None,
    ) -> None:
        """Create a factory.

        end_ids: the model's end-of-text tokens.
        heads: the measured attention window of every head, or None if it was not measured.
        importance: the measured importance of every KV head, or None if it was not measured.
        """
        self._end_ids = end_ids
        self._heads = heads
        self._importance = importance
        self._ids: Iterator[int] = itertools.count(1)

    def prefix_opening(
        self, length: int, drafted: bool, fork: Fork | None = None, attention_window: Window | None = None
    ) -> Opening:
        """Return the opening of a prefix: a sequence that is prefilled, kept and forked, and that never
        decodes. It gets a new sequence id.

        length: number of tokens of the prefix, including those that it forks.
        drafted: True if the drafter keeps KV of the prefix too.
        fork: the other prefix whose first tokens it shares, and how many; None if it shares none.
        attention_window: sinks and recent tokens to which its tokens attend; None for all tokens.
        """
        return Opening(next(self._ids), length, fork, decodes=False, drafted=drafted, window=attention_window)

    def decoding_opening(
        self,
        prompt_length: int,
        ask: Ask,
        seed: int,
        *,
        ordinal: int,
        limit: int,
        rules: PlanRules | None = None,
        trace: str | None = None,
        soft_limit: int | None = None,
        excluded_first: tuple[int, ...] = (),
    ) -> Opening:
        """Return the opening of a sequence that decodes up to `limit` tokens. It gets a new sequence id.
        `min_tokens` is at most the limit.

        With `rules` the sequence ends where the plan's grammar ends, and no token stops it. Without rules a
        stop token ends it; if the client gave a form (a grammar of its own), either of the two may. With
        `rules` the form is dropped. With `ignore_eos` only the client's own stop tokens end a sequence
        without rules. If the client wants per-head settings, windows of heads are used without pruning, and
        the importance of heads with pruning.

        prompt_length: number of tokens of the prompt, including those that a fork shares.
        ask: what the client asks for: sampling, stop tokens, logprobs, attention window.
        seed: the request's sampling seed.
        ordinal: 0 for the skeleton or the answer, PLAN_ORDINAL for a speculative skeleton,
            else the point's id. A branch gets its share of
            `min_tokens`.
        limit: the maximum number of tokens that the sequence may decode.
        rules: the plan grammar that constrains the sequence; None for a sequence that is no skeleton, or is
            not constrained.
        trace: the request's tracing context, which the stages put on their spans; None without tracing.
        soft_limit: the tokens from which on the sequence ends after a sentence; None for no soft end. There
            is none either if the client wants a form, or wants the model's end tokens ignored.
        excluded_first: the ids of tokens that the sequence must not begin with; empty for none.
        """
        ends = ask.stop_token_ids if ask.ignore_eos else (*self._end_ids, *ask.stop_token_ids)
        min_tokens = least_of(ask, limit) if ordinal else ask.min_tokens
        bound = bool(rules or ask.form or ask.ignore_eos or not self._end_ids)
        soft = None if bound or soft_limit is None else SoftEnd(soft_limit, self._end_ids[0])
        return Opening(
            sequence=next(self._ids),
            prompt=prompt_length,
            sampling=ask.sampling,
            seed=seed,
            ordinal=ordinal,
            stop_ids=() if rules else tuple(sorted(set(ends))),
            limit=limit,
            plan=rules,
            logprobs=ask.logprobs,
            form=None if rules else ask.form,
            drafter=ask.drafter,
            trace=trace,
            window=ask.window,
            pruning=ask.pruning,
            heads=self._heads if ask.head_aware and not ask.pruning else None,
            importance=self._importance if ask.head_aware and ask.pruning else None,
            min_tokens=min(min_tokens, limit),
            prompt_logprobs=ask.prompt_logprobs,
            soft_end=soft,
            excluded_first=excluded_first,
        )

    def reopening(self, opening: Opening, num_written: int) -> Opening:
        """Return the opening of the same sequence under a new id, for a ring that does not have its KV.
        Tokens that were decoded become part of the prompt, so that prefill rebuilds their KV:

            prompt 10, 5 tokens decoded, reopened -> prompt 15, generated 5
            3 more tokens decoded, reopened       -> prompt 15 - 5 + 8 = 18, generated 8

        Prompt logprobs are requested again only if no token was decoded, as they are reported with the first
        token. All other fields are kept.

        opening: the sequence's newest opening.
        num_written: how many tokens the sequence has decoded over all its openings.
        """
        prompt = opening.prompt - opening.generated + num_written
        scores = opening.prompt_logprobs
        return replace(
            opening,
            sequence=next(self._ids),
            prompt=prompt,
            generated=num_written,
            prompt_logprobs=None if num_written else scores,
        )


def first_lease(prompt_length: int, lease_positions: int) -> int:
    """Return the first lease of a sequence: the position up to which stage 0 may decode.

    prompt_length: number of tokens of the prompt.
    lease_positions: positions that a lease adds.
    """
    return prompt_length + lease_positions


def renewed_lease(position: int, lease: int, max_position: int, lease_positions: int) -> int | None:
    """Return the next lease, or None if no renewal is needed yet. A lease may reach beyond `max_position`.

    A lease is renewed when at most half of `lease_positions` are left, unless it already reaches the end.
    With lease_positions 256, lease 256 and max_position 1000: position 100 leaves 156 positions -> None;
    position 180 leaves 76 -> 512.

    position: number of tokens that the sequence has, prompt included.
    lease: the position up to which stage 0 may decode now.
    max_position: the largest number of tokens that the sequence can ever have, prompt included.
    lease_positions: positions added per renewal.
    """
    if lease >= max_position or lease - position > lease_positions // 2:
        return None
    return max(lease, position) + lease_positions


@dataclass(slots=True)
class TokenLog:
    """Every token of a sequence, prompt and decoded. After a failure the KV cache is rebuilt from this log.

    opening: the opening under which the sequence runs now, or ran last.
    prompt: the tokens that the sequence was first opened with, those that it forks included.
    written: the tokens decoded since, over all openings of the sequence.
    next_draft_round: the draft round of the outcome that must come next; 0 is the round that ends the prompt.
    end: why the sequence ended, or None while it runs.
    final_rows: number of first tokens whose KV is final on every stage; 0 until the first result of the
        present opening. When the result of a draft round arrives, every stage has run the round's frame,
        which has put the KV of all tokens before its root in place; the KV of the tokens that the result
        accepts moves with the next frame.
            # tokens a b c, c is the newest and root of the tree; a result accepts d and brings e
            # -> tokens a b c d e, final are those of a and b
    """

    opening: Opening
    prompt: tuple[int, ...]
    written: list[int] = field(default_factory=list[int])
    next_draft_round: int = 0
    end: End | None = None
    final_rows: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids in order: the prompt, then the decoded ones."""
        return (*self.prompt, *self.written)

    @property
    def position(self) -> int:
        """Number of tokens that the sequence has, prompt included."""
        return len(self.prompt) + len(self.written)

    @property
    def max_position(self) -> int:
        """The largest number of tokens that the sequence can ever have, prompt included."""
        return len(self.prompt) + self.opening.limit

    @property
    def has_output(self) -> bool:
        """True if an outcome has arrived since the sequence was opened. Then its prompt is in the ring, and
        the prefix that it was forked from is no longer needed for it.
        """
        return self.next_draft_round > 0 or self.end is not None

    def reopen(self, opening: Opening) -> None:
        """Continue the log under a new opening. Draft rounds count from 0 again; outcomes that were in flight
        are not expected any more.

        opening: the opening that stage 0 receives, with a new sequence id.
        """
        self.opening = opening
        self.next_draft_round = 0
        self.final_rows = 0

    def append(self, outcome: Outcome) -> tuple[int, ...]:
        """Append the tokens of an outcome and return those that are new to the log. Appended tokens extend
        `written`; the next expected round, the number of final rows and, if the outcome ends the sequence,
        `end` are updated.

        Draft rounds must arrive without a gap. With next_draft_round = 3: round 2 is a repeat and returns (),
        round 3 is appended, round 4 raises WireError. After the end of the sequence every outcome returns ().
        An outcome that ends the sequence with FAILED is accepted at any round.

        outcome: what a step of the ring did for this sequence: its accepted tokens, and why it ended, if it
            did.

        Raises WireError if an earlier draft round is missing.
        """
        # A sequence may fail in any draft round, so the round of such an outcome is not checked.
        failed = outcome.end is End.FAILED
        if self.end is not None or (outcome.draft_round < self.next_draft_round and not failed):
            return ()
        if outcome.draft_round > self.next_draft_round and not failed:
            missing = f"result of draft round {outcome.draft_round} came, {self.next_draft_round} is missing"
            raise WireError(f"sequence {outcome.sequence}: {missing}")
        self.final_rows = self.position - 1
        self.written.extend(outcome.tokens)
        self.next_draft_round = outcome.draft_round + 1
        self.end = outcome.end
        return outcome.tokens


# Returns the text of token ids; "" for none.
Decode = Callable[[Sequence[int]], str]

# Returns the text of one token id, or None if that text may depend on the tokens before it.
DecodeAlone = Callable[[int], str | None]

BROKEN = "\ufffd"  # The replacement character: decoders write it for bytes that are not a whole character.
# Tokens. Bounds how long text is held back for an incomplete character. A character has at most 4 bytes, so
# bytes that are still broken after this many tokens stay broken.
MAX_PENDING_TOKENS = 16


class Detokenizer:
    """Incremental detokenizer of one sequence: turns its token ids into text as they arrive.

    Each `feed` decodes the tokens since the last whole character together with a few tokens before them, and
    returns only the text that is new: many tokenizers drop the leading space of the first token that they
    decode.

        feed [" caf"]  -> " caf"     context [" caf"], pending []
        feed [0xC3]    -> ""         pending [0xC3]: half of a character, held back
        feed [0xA9]    -> "é"        context [0xC3 0xA9], pending []

    A token whose text does not depend on its neighbours, as most tokens of byte-level vocabularies, is not
    decoded again together with its context.
    """

    def __init__(
        self,
        decode: Decode,
        preceding_tokens: Sequence[int] = (),
        decode_alone: DecodeAlone = lambda _: None,
    ) -> None:
        """Create a detokenizer.

        decode: returns the text of token ids.
        preceding_tokens: the tokens before the first one, if the text continues; their text is not returned
            again. Empty for a text of its own.
        decode_alone: returns the text of one token after whole characters, or None if it may depend on the
            tokens before.
        """
        self._decode = decode
        self._decode_alone = decode_alone
        self._context = list(preceding_tokens)
        self._pending: list[int] = []
        # Characters of the decoded context and pending tokens that were already returned.
        self._shown = len(decode(self._context).rstrip(BROKEN)) if preceding_tokens else 0
        # True if all text of the context was returned, so that the next token begins a character.
        self._is_whole = not preceding_tokens or self._shown == len(decode(self._context))

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" if they complete no character. A character whose
        bytes have not all arrived is held back, for at most MAX_PENDING_TOKENS tokens. After more than
        MAX_PENDING_TOKENS tokens the broken bytes are returned as replacement characters. No tokens give
        "".

        tokens: the next token ids of the sequence.
        """
        if self._is_whole and len(tokens) == 1 and (alone := self._decode_alone(tokens[0])) is not None:
            if alone:
                self._context = list(tokens)
                self._shown = len(alone)
            return alone
        self._pending.extend(tokens)
        text = self._decode(self._context + self._pending)
        whole = text.rstrip(BROKEN) if len(self._pending) <= MAX_PENDING_TOKENS else text
        delta = whole[self._shown :]
        self._is_whole = len(whole) == len(text)
        if self._is_whole:
            self._slide()
        else:
            self._shown = max(self._shown, len(whole))
        return delta

    def flush(self) -> str:
        """Return the text that was held back, as no more tokens come; "" if none was. Trailing bytes of an
        incomplete character are dropped. No token is pending afterwards.
        """
        text = self._decode(self._context + self._pending).rstrip(BROKEN)
        delta = text[self._shown :]
        self._pending = []
        return delta

    def _slide(self) -> None:
        """Make the pending tokens the context of the next `feed`. If they decode to no text (special tokens),
        the old context stays. No token is pending afterwards.
        """
        shown = self._decode(self._pending)
        if shown:
            self._context = self._pending
            self._shown = len(shown)
        self._pending = []


@dataclass(slots=True)
class ActiveSequence:
    """A sequence that decodes, as the master tracks it: its tokens, its text, its lease and its KV pages.

    log: the sequence's opening and tokens.
    detokenizer: turns the sequence's tokens into text.
    spell: returns the bytes of a token id, for logprobs.
    pages: number of KV pages that the request is charged for this sequence; 0 before the sequence is placed.
    lease: the position up to which stage 0 may decode the sequence before the master renews; 0 before the
        sequence is placed.
    lost: True while the sequence is in no ring: before it is first placed, and after its epoch ended until it
        is opened again.
    ends: True if the text of the token that stops the sequence is part of the sequence's text.
    """

    log: TokenLog
    detokenizer: Detokenizer
    spell: Callable[[int], bytes]
    pages: int = 0
    lease: int = 0
    lost: bool = True
    ends: bool = False

    @property
    def id(self) -> int:
        """The id of the sequence in the ring; it changes when the sequence is opened again."""
        return self.log.opening.sequence

    @property
    def ordinal(self) -> int:
        """0 for the skeleton or the answer, PLAN_ORDINAL for a speculative skeleton, else the id of the point
        that the sequence writes.
        """
        return self.log.opening.ordinal

    @property
    def has_work(self) -> bool:
        """True if the ring's next step may advance the sequence: it decodes, and it is in its prompt or
        within its lease.

        `log.position` counts the newest token, which stage 0 has not fed yet. With position p, p - 1
        positions are committed, so p <= lease here is the same test as committed < lease at stage 0.
        """
        log = self.log
        return log.opening.decodes and (not log.has_output or log.position <= self.lease)

    def read(
        self, tokens: Sequence[int], logprobs: Sequence[Logprob] = (), prompt_logprobs: Sequence[Logprob] = ()
    ) -> list[TextPiece]:
        """Turn the newly appended tokens into pieces of text, one per token; no pieces if nothing was
        appended and the sequence goes on. The last piece is left out if it would carry neither text nor a
        stop token.

        After the sequence's end, a last piece without a token carries the text that was held back and the
        token that stopped the sequence. If the sequence ended by a stop token, that token yields no piece of
        its own unless `ends` is set. Prompt logprobs come in a piece of their own before all others.

        tokens: the tokens that `TokenLog.append` returned; empty for a repeated outcome.
        logprobs: the logprobs of `tokens`, one each, or empty if the client asked for none.
        prompt_logprobs: the logprobs of all prompt tokens except the first, or empty.
        """
        over = self.log.end
        stop = None
        if over is End.STOP and tokens and tokens[-1] in self.log.opening.stop_ids:
            stop = tokens[-1]
            tokens = tokens if self.ends else tokens[:-1]
        token_logprobs = (
            map(self._logprobs_for_client, tokens, logprobs) if logprobs else itertools.repeat(None)
        )
        pieces = [
            TextPiece(token, self.detokenizer.feed((token,)), one)
            for token, one in zip(tokens, token_logprobs)
        ]
        rest = self.detokenizer.flush() if over else ""
        if prompt_logprobs:
            scored = map(self._logprobs_for_client, self.log.prompt[1:], prompt_logprobs)
            pieces.insert(0, TextPiece(None, "", prompt=tuple(scored)))
        return [*pieces, TextPiece(None, rest, stop=stop)] if rest or stop is not None else pieces

    def _logprobs_for_client(self, token: int, logprob: Logprob) -> TokenLogprobs:
        """Return the logprobs of one token in the form that clients receive: each token with its id, its
        bytes and its logprob.

        token: the id of the token that was written.
        logprob: its log probability, and those of the likeliest tokens at its position.
        """
        top = (Candidate(other, self.spell(other), score) for other, score in logprob.top)
        return TokenLogprobs(Candidate(token, self.spell(token), logprob.logprob), tuple(top))

    def order(self) -> Open:
        """Return the order that opens the sequence at stage 0. The tokens of the forked part are not sent:
        stage 0 has them. The order carries the sequence's lease.
        """
        opening = self.log.opening
        shared = opening.fork.length if opening.fork else 0
        return Open(opening, self.log.tokens[shared:], self.lease)
