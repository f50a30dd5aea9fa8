"""From what a caller asks to a request that may wait for its turn, or a clear refusal.

Refuses to know queues, sequences and results.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass

from specsot.errors import InvalidRequest, NotFound, Unavailable
from specsot.params import LONGEST_TOKEN, Ask
from specsot.skeleton import Point
from specsot.tracing import caller, current
from specsot_master.conductor.admission import Beginning, Sizes, begin_answer, begin_plan, reach
from specsot_master.conductor.live import LONG, LiveRequest
from specsot_master.conductor.ring import Caller, Ring, RingState
from specsot_master.journal import Kept
from specsot_master.plan import RequestPlan, check_plan, mode_of, rules_of
from specsot_master.prompts import Conversation, Prompts, messages_of

ROLES = ("system", "user", "assistant", "tool")
LONGEST_STOP, LONGEST_ID = 256, 128

_PROBE = Point(id=1, length=1, title="-")


@dataclass(frozen=True, slots=True)
class Words:
    """A request's prompts in tokens: of a direct answer, or the turns of a planned one and their sizes."""

    answer: tuple[int, ...] = ()
    conversation: Conversation | None = None
    sizes: Sizes | None = None


class Acceptance:
    """Checks and prepares requests for one model."""

    def __init__(
        self, ring: Ring, prompts: Prompts, model: str, vocabulary: int, knows_heads: bool = False
    ) -> None:
        """knows_heads: what the model's heads attend to was measured."""
        self._knows_heads = knows_heads
        self._ring, self._prompts, self._model, self._vocabulary = ring, prompts, model, vocabulary
        self._arrivals = itertools.count()
        self._known: RingState | None = None

    def remember(self, ring: RingState) -> None:
        """Until the next ring is there, who comes is measured by this one; then by that (`fit`)."""
        self._known = ring

    def check(self, ask: Ask, id: str | None) -> None:
        """What can be said at once. Raises NotFound (the model), Unavailable (there was no ring yet),
        InvalidRequest.
        """
        if ask.model not in ("", self._model):
            raise NotFound(f"no model named {ask.model!r} here, only {self._model!r}")
        ring = self._ring_to_fit()
        check_words(ask, id, reach(ask, ring))
        check_plan(ask)
        check_tokens(ask, self._vocabulary)
        check_drafter(ask, ring)
        if ask.head_aware and not self._knows_heads:
            raise InvalidRequest(
                f"head_aware: nothing was measured of the heads of {self._model!r} "
                "(`specsot bench policies --find-heads` does)",
                "head_aware",
            )

    async def word(self, ask: Ask) -> Words:
        """Its prompts; long ones are made in a thread, so that nobody else waits. Raises InvalidRequest."""
        if size_of(ask) < LONG:
            return self._word(ask)
        return await asyncio.to_thread(self._word, ask)

    def prepare(self, ask: Ask, caller: Caller, now: float, words: Words) -> LiveRequest:
        """Raises InvalidRequest (it can never fit), Unavailable (there was no ring yet)."""
        beginning = begin(ask, words, self._ring_to_fit())
        id = caller.request or secrets.token_hex(8)
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        request = self._make(ask, id, caller.client, seed, now, words)
        request.owner, request.beginning = caller.owner, beginning
        return request

    async def recall(self, kept: Kept, since: float) -> LiveRequest:
        """One that a master before this one took; nothing of it has happened yet. Raises InvalidRequest."""
        words = await self.word(kept.ask)
        return self._make(kept.ask, kept.id, kept.client, kept.seed, since, words)

    def _ring_to_fit(self) -> RingState:
        return self._ring.state() or self._known or require_ring(self._ring)

    def _make(self, ask: Ask, id: str, client: str, seed: int, since: float, words: Words) -> LiveRequest:
        return LiveRequest(
            id=id,
            client=client,
            arrival=next(self._arrivals),
            ask=ask,
            seed=seed,
            plan=RequestPlan(ask, id, seed, self._model, since, self._prompts.size),
            since=since,
            trace=current.get() or caller.get(),
            answer=words.answer,
            conversation=words.conversation,
            sizes=words.sizes,
        )

    def _word(self, ask: Ask) -> Words:
        messages = messages_of(ask)
        if mode_of(ask) == "direct":
            return Words(ask.tokens or self._prompts.chat(messages))
        said = self._prompts.plan(messages, rules_of(ask))
        return Words((), said, _measure(said))


def begin(ask: Ask, words: Words, ring: RingState) -> Beginning:
    """What its prompts begin with, and the pages they ask for. Raises InvalidRequest."""
    if words.conversation is None or words.sizes is None:
        _check_prompt(words.answer)
        return begin_answer(words.answer, ask, ring)
    return begin_plan(words.conversation.prefix, words.sizes, ask, ring)


def fit(request: LiveRequest, ring: RingState) -> None:
    """The same for a request that met another ring before. Raises InvalidRequest."""
    words = Words(request.answer, request.conversation, request.sizes)
    request.beginning = begin(request.ask, words, ring)


def size_of(ask: Ask) -> int:
    """Characters that must be turned into tokens."""
    return len(ask.prompt or "") + sum(len(message.content) for message in ask.messages)


def check_words(ask: Ask, id: str | None, max_positions: int) -> None:
    """Raises InvalidRequest for what is too long to even look at, and for roles no template knows."""
    size = size_of(ask)
    rules = (
        (len(ask.tokens) < max_positions, "tokens", f"{len(ask.tokens)} tokens cannot fit the context"),
        (
            size <= LONGEST_TOKEN * max_positions,
            "prompt",
            f"{size} characters cannot fit the context",
        ),
        (all(one.role in ROLES for one in ask.messages), "messages", f"roles are {', '.join(ROLES)}"),
        (
            all(len(one) <= LONGEST_STOP for one in ask.stop),
            "stop",
            f"at most {LONGEST_STOP} characters",
        ),
        (len(id or "") <= LONGEST_ID, "request_id", f"at most {LONGEST_ID} characters"),
    )
    for holds, field, rule in rules:
        if not holds:
            raise InvalidRequest(f"{field}: {rule}", field=field)


def check_drafter(ask: Ask, ring: RingState) -> None:
    """Raises InvalidRequest, naming whom the fleet has, for one that it has not."""
    here = (*ring.drafters, "none")
    if ask.drafter is not None and ask.drafter not in here:
        raise InvalidRequest(
            f"drafter {ask.drafter} is not in this fleet, which has {', '.join(here)}", field="drafter"
        )


def check_tokens(ask: Ask, vocabulary: int) -> None:
    """Raises InvalidRequest for a token the model does not have."""
    named = {"logit_bias": [token for token, _ in ask.sampling.logit_bias], "tokens": ask.tokens}
    for field, tokens in named.items():
        if (last := max(tokens, default=0)) >= vocabulary:
            raise InvalidRequest(
                f"{field} names token {last}, the model's are 0 .. {vocabulary - 1}", field=field
            )


def require_ring(ring: Ring) -> RingState:
    """The complete ring. Raises Unavailable, saying what is missing."""
    state = ring.state()
    if state is None:
        raise Unavailable(f"the ring is not complete: waiting for {ring.waiting_for()}")
    return state


def _check_prompt(tokens: tuple[int, ...]) -> None:
    if not tokens:
        raise InvalidRequest("the prompt has no tokens", field="prompt")


def _measure(conversation: Conversation) -> Sizes:
    turn = conversation.branch(_PROBE, [_PROBE], [], 1)
    return Sizes(len(conversation.prefix), len(conversation.skeleton.tokens), len(turn.suffix))
