"""One sequence: its opening at stage 0, its lease, its token log, its text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specsot.core.frames import End, Fork, Logprob, Open, Opening, Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import WireError
from specsot.events import Candidate, TokenLogprobs
from specsot.params import Ask, HeadImportance, HeadWindows, Window
from specsot_master.core.limits import least_of
from specsot_master.core.plans.text_pieces import TextPiece


class SequenceFactory:
    """Makes every opening of a master's life, so that no sequence id comes twice."""

    def __init__(
        self,
        end_ids: tuple[int, ...],
        heads: HeadWindows | None = None,
        importance: HeadImportance | None = None,
    ) -> None:
        """heads, importance: what was measured for the model's heads, if it was."""
        self._end_ids = end_ids
        self._heads = heads
        self._importance = importance
        self._ids: Iterator[int] = itertools.count(1)

    def prefix(
        self, length: int, drafted: bool, fork: Fork | None = None, window: Window | None = None
    ) -> Opening:
        """Prefilled, kept and forked; it never writes."""
        return Opening(next(self._ids), length, fork, decodes=False, drafted=drafted, window=window)

    def writer(
        self,
        prompt: int,
        ask: Ask,
        seed: int,
        *,
        ordinal: int,
        limit: int,
        rules: PlanRules | None = None,
        trace: str | None = None,
    ) -> Opening:
        """A sequence that writes up to `limit` tokens. With rules the grammar ends it, else an end token;
        with a form both may.
        """
        ends = ask.stop_token_ids if ask.ignore_eos else (*self._end_ids, *ask.stop_token_ids)
        least = least_of(ask, limit) if ordinal else ask.min_tokens
        return Opening(
            sequence=next(self._ids),
            prompt=prompt,
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
            min_tokens=min(least, limit),
            prompt_logprobs=ask.prompt_logprobs,
        )

    def again(self, opening: Opening, written: int) -> Opening:
        """The same, for a ring that knows nothing of it. written: how many tokens it has to its name."""
        prompt = opening.prompt - opening.generated + written
        scores = opening.prompt_logprobs
        return replace(
            opening,
            sequence=next(self._ids),
            prompt=prompt,
            generated=written,
            prompt_logprobs=None if written else scores,
        )


def first_lease(prompt: int, grant: int) -> int:
    """The position up to which a new sequence may be fed."""
    return prompt + grant


def renewed_lease(position: int, lease: int, last: int, grant: int) -> int | None:
    """The next lease, or None while there is no need: less than half is used, or it reaches the end.

    position: tokens there are, prompt included. last: the position no token can lie behind.
    """
    if lease >= last or lease - position > grant // 2:
        return None
    return max(lease, position) + grant


@dataclass(slots=True)
class TokenLog:
    """prompt: every token it was asked with, the forked part included. written: since then, over all its
    openings. next_step: of the outcome that comes next.
    """

    opening: Opening
    prompt: tuple[int, ...]
    written: list[int] = field(default_factory=list[int])
    next_step: int = 0
    end: End | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.written)

    @property
    def position(self) -> int:
        """Tokens there are, prompt included."""
        return len(self.prompt) + len(self.written)

    @property
    def max_position(self) -> int:
        """Tokens there can ever be."""
        return len(self.prompt) + self.opening.limit

    @property
    def has_output(self) -> bool:
        """It has an outcome, so its prompt is in the ring and its source is no longer needed."""
        return self.next_step > 0 or self.end is not None

    def reopen(self, opening: Opening) -> None:
        """It goes on as another sequence; what was under way is not known of."""
        self.opening = opening
        self.next_step = 0

    def append(self, outcome: Outcome) -> tuple[int, ...]:
        """The new tokens; none for an outcome that was here before. Raises WireError if one is missing."""
        failed = outcome.end is End.FAILED  # may come at any step
        if self.end is not None or (outcome.step < self.next_step and not failed):
            return ()
        if outcome.step > self.next_step and not failed:
            missing = f"result of step {outcome.step} came, {self.next_step} is missing"
            raise WireError(f"sequence {outcome.sequence}: {missing}")
        self.written.extend(outcome.tokens)
        self.next_step = outcome.step + 1
        self.end = outcome.end
        return outcome.tokens


Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"  # how decoders write bytes that are no character (yet)
MAX_PENDING_TOKENS = 16  # tokens; a character has at most 4 bytes, so what is broken by then stays broken


class Detokenizer:
    """One sequence's text. Each feed decodes the tokens since the last whole character, behind a few before
    them (a first token's space is often left out); `before`: those of a text that goes on.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(before)
        self._pending: list[int] = []
        self._shown = len(decode(self._context).rstrip(BROKEN)) if before else 0  # characters that are out

    def feed(self, tokens: Sequence[int]) -> str:
        """The text these tokens complete; a character whose bytes are not all here is held back."""
        self._pending.extend(tokens)
        text = self._decode(self._context + self._pending)
        whole = text.rstrip(BROKEN) if len(self._pending) <= MAX_PENDING_TOKENS else text
        delta = whole[self._shown :]
        if len(whole) == len(text):
            self._slide()
        else:
            self._shown = max(self._shown, len(whole))
        return delta

    def flush(self) -> str:
        """What is left when no more tokens come. Bytes of an unfinished character are dropped."""
        text = self._decode(self._context + self._pending).rstrip(BROKEN)
        delta = text[self._shown :]
        self._pending = []
        return delta

    def _slide(self) -> None:
        """What is pending becomes the context, unless it writes nothing (special tokens)."""
        shown = self._decode(self._pending)
        if shown:
            self._context = self._pending
            self._shown = len(shown)
        self._pending = []


@dataclass(slots=True)
class ActiveSequence:
    """A sequence that writes. `pages`: charged for it. `spell`: a token's bytes.

    lost: it is in no ring; where its epoch is over, it waits to be opened again. ends: its
    end token is part of its text.
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
        return self.log.opening.sequence

    @property
    def ordinal(self) -> int:
        return self.log.opening.ordinal

    @property
    def has_work(self) -> bool:
        """The next lap may bring it on: it is not paused by its lease, and more than a prefix."""
        log = self.log
        return log.opening.decodes and (not log.has_output or log.position <= self.lease)

    def read(
        self, tokens: Sequence[int], chances: Sequence[Logprob] = (), prompt: Sequence[Logprob] = ()
    ) -> list[TextPiece]:
        """New tokens as pieces of text; at the end, with what was held back, and which token it ended with.

        chances: of the tokens, or none. prompt: of the prompt's tokens but the first.
        """
        over = self.log.end
        stop = None
        if over is End.STOP and tokens and tokens[-1] in self.log.opening.stop_ids:
            stop = tokens[-1]
            tokens = tokens if self.ends else tokens[:-1]
        told = map(self._tell, tokens, chances) if chances else itertools.repeat(None)
        pieces = [TextPiece(token, self.detokenizer.feed((token,)), one) for token, one in zip(tokens, told)]
        rest = self.detokenizer.flush() if over else ""
        if prompt:
            scored = map(self._tell, self.log.prompt[1:], prompt)
            pieces.insert(0, TextPiece(None, "", prompt=tuple(scored)))
        return [*pieces, TextPiece(None, rest, stop=stop)] if rest or stop is not None else pieces

    def _tell(self, token: int, chance: Logprob) -> TokenLogprobs:
        top = (Candidate(other, self.spell(other), logprob) for other, logprob in chance.top)
        return TokenLogprobs(Candidate(token, self.spell(token), chance.logprob), tuple(top))

    def order(self) -> Open:
        opening = self.log.opening
        shared = opening.fork.length if opening.fork else 0
        return Open(opening, self.log.tokens[shared:], self.lease)
