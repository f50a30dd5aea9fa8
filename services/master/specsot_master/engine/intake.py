"""Validates a request and encodes its prompts before it may wait in the queue."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from bisect import bisect_left
from dataclasses import replace

from specsot.errors import InvalidRequest, NotFound, TimedOut, TooLarge
from specsot.params import MAX_NEW_TOKENS, MAX_TOKENS, Ask
from specsot.tasks import start
from specsot.tracing import caller, current
from specsot_master.core.commands import OpenBranch
from specsot_master.core.inputs import PromptMade
from specsot_master.core.limits import (
    check_drafter,
    check_plan,
    check_sizes,
    check_tokens,
    limited,
    prompt_characters,
    rules_of,
)
from specsot_master.core.plans.forecast import Forecaster, Workload
from specsot_master.core.plans.fork_plan import ALONE, FORKED, ForkPlan, may_fork
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.prompts import SAMPLE_POINT
from specsot_master.core.plans.router import MIN_PLANNED_TOKENS, Decision, decide, decide_question
from specsot_master.core.plans.time_limit import choose, points_in_time
from specsot_master.core.request import Clock, EncodedPrompt, Home, RequestState
from specsot_master.core.ring.admission import PlanSizes, position_limit
from specsot_master.core.ring.fitting import prefix_of, refit
from specsot_master.core.ring.ring_state import Caller, EngineConfig, Ring, RingState, require_ring
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.journal import JournaledRequest
from specsot_master.prompts import Prompts, messages_of

# Characters: shorter texts are tokenised on the loop, in a few ms; what SmolLM2's template writes for a turn.
THREAD_CHARACTERS = 16 << 10
TURN_CHARACTERS = 24


class Intake:
    """Checks requests and words their prompts, beside everybody else's. inside: how many it looks into.

    home: who runs them.
    """

    def __init__(
        self,
        home: Home,
        ring: Ring,
        prompts: Prompts,
        forms: GrammarSandbox,
        clock: Clock,
        config: EngineConfig,
        costs: Forecaster,
    ) -> None:
        self._home = home
        self._costs = costs
        self._ring = ring
        self._prompts = prompts
        self._forms = forms
        self._config = config
        self._clock = clock
        self._arrivals = itertools.count()
        self._known: RingState | None = None
        self._making: set[tuple[RequestState, int]] = set()
        self.inside = 0

    def remember(self, ring: RingState) -> None:
        """Until the next ring is there, who comes is measured by this one; then by that (`refit`)."""
        self._known = ring

    async def validate(self, ask: Ask, caller: Caller) -> tuple[Ask, EncodedPrompt, float | None]:
        """With as many tokens as fit, where it names no number; its prompts, and the seconds it has left.

        Raises TimedOut, and whatever is wrong with it.
        """
        timeout = caller.timeout
        self._check(ask, caller.request)
        begun = self._clock.now()
        self.inside += 1
        try:
            async with asyncio.timeout(timeout):
                ask, prompt = await self._fit(ask)
                prefix_of(ask, prompt, self._ring_to_fit())
                check_plan(ask, self._prompts.listed)
                if ask.form:
                    await self._forms.check(ask.form, caller.client, ask.limits.new_tokens)
        except TimeoutError:
            raise TimedOut("the deadline passed while the request was looked into") from None
        finally:
            self.inside -= 1
        left = None if timeout is None else timeout - (self._clock.now() - begun)
        check_deadline(left)
        return ask, prompt, left

    async def _fit(self, ask: Ask) -> tuple[Ask, EncodedPrompt]:
        """Encode a request's prompts. A request that names no limit gets its endpoint's default, or as many
        tokens as the model's context and the ring's KV pages hold after the prompt.
        """
        prompt = await self._encode(ask, position_limit(ask, self._ring_to_fit()))
        if ask.limits.max_new_tokens is not None:
            return ask, prompt
        usual = ask.limits.new_tokens
        if (tokens := self._room(ask, prompt, usual)) == usual:
            # The journal and other masters know only the limit itself, not an endpoint's default.
            return (ask if usual == MAX_NEW_TOKENS else limited(ask, usual)), prompt
        if prompt.conversation is not None:
            prompt = await self._encode(limited(ask, tokens))  # its plan has fewer points
            if prompt.conversation is None:  # or there is none, and this prompt is shorter
                tokens = self._room(ask, prompt, MIN_PLANNED_TOKENS - 1)
        return limited(ask, tokens), prompt

    def _room(self, ask: Ask, prompt: EncodedPrompt, most: int) -> int:
        """Tokens that the context and the ring's KV pages hold after a prompt: between one and `most`."""
        ring = self._ring_to_fit()
        bare = replace(ask, prompt="-", messages=(), tokens=(), min_tokens=0)  # looked at for every number

        def exceeds(count: int) -> bool:
            try:
                prefix_of(limited(bare, count), prompt, ring)
            except TooLarge:  # the context's limit is one of its kinds
                return True
            except InvalidRequest:
                pass  # told when all is known
            return False

        return max(bisect_left(range(1, most), True, key=exceeds), 1) if exceeds(most) else most

    def build(self, ask: Ask, caller: Caller, now: float, prompt: EncodedPrompt) -> RequestState:
        """Raises InvalidRequest (it can never fit), Unavailable (there was no ring yet)."""
        id = caller.request or secrets.token_hex(8)
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        request = self._make(ask, id, caller.client, seed, now, prompt)
        request.owner = caller.owner
        refit(request, self._ring_to_fit())
        return request

    async def rebuild(self, kept: JournaledRequest, since: float) -> RequestState:
        """One that a master before this one took; nothing of it has happened yet. Raises InvalidRequest."""
        prompt = await self._encode(kept.ask)
        request = self._make(kept.ask, kept.id, kept.client, kept.seed, since, prompt)
        request.owner = kept.owner
        return request

    def has_turn(self, request: RequestState, order: OpenBranch) -> bool:
        """Whether a branch's prompt is there, or made in no time. If not it is made in a thread, and its
        request's home is told.
        """
        if request.unmade(order) < THREAD_CHARACTERS:
            return True
        if (request, order.point.id) not in self._making:
            start(self._make_turn(request, order))
        return False

    async def _make_turn(self, request: RequestState, order: OpenBranch) -> None:
        one = (request, order.point.id)
        failure = None
        self._making.add(one)
        try:
            await asyncio.to_thread(request.branch_turn, order)
        except Exception as error:
            failure = error
        self._making.discard(one)
        request.home.handle(PromptMade(request, failure))

    def _check(self, ask: Ask, id: str | None) -> None:
        """What can be said at once. Raises NotFound (the model), Unavailable (there was no ring yet),
        InvalidRequest.
        """
        model = self._config.model
        ring = self._ring_to_fit()
        if ask.model not in ("", model):
            raise NotFound(f"no model named {ask.model!r} here, only {model!r}")
        check_sizes(ask, id, position_limit(ask, ring))
        check_plan(ask, self._prompts.listed)
        check_tokens(ask, self._config.vocabulary)
        check_drafter(ask, ring.drafters)
        if (ask.policy or ask.head_aware) and self._config.recurrent:
            raise InvalidRequest(
                f"windows, pruning, head_aware: gated delta layers of {model!r} read every row"
            )
        measured = self._config.importance if ask.pruning else self._config.heads
        if ask.head_aware and measured is None:
            missing = "no importance" if ask.pruning else "nothing"
            raise InvalidRequest(
                f"head_aware: {missing} was measured of the heads of {model!r} "
                "(`specsot bench policies --find-heads` does)",
                "head_aware",
            )

    def _ring_to_fit(self) -> RingState:
        return self._ring.state() or self._known or require_ring(self._ring)

    async def _encode(self, ask: Ask, positions: int = MAX_TOKENS) -> EncodedPrompt:
        """Its prompts; long ones are made in a thread, so that nobody else waits. Raises InvalidRequest."""
        if prompt_characters(ask) + TURN_CHARACTERS * len(ask.messages) < THREAD_CHARACTERS:
            return self._word(ask)
        await asyncio.to_thread(self._prompts.check_fits, ask, positions)
        return await asyncio.to_thread(self._word, ask)

    def _word(self, ask: Ask) -> EncodedPrompt:
        messages = messages_of(ask)
        if (tags := self._prompts.tags) and may_fork(ask):
            return EncodedPrompt(FORKED, ask.tokens or self._prompts.thinking(messages), tags=tags)
        decision = decide(ask, messages, not self._prompts.listed, self._prompts.threshold)
        decision = Decision("direct", ALONE) if tags and decision.mode != "direct" else decision
        kind = decide_question(messages[-1].content).reason if messages else ""
        workload = Workload(prompt_characters(ask) // 4, ask.limits, kind=kind)  # about so many tokens
        decision = choose(decision, ask, self._costs, workload)
        score = self._prompts.score(messages) if decision.threshold is not None else None
        if decision.mode == "direct":
            return EncodedPrompt(decision, ask.tokens or self._prompts.chat(messages), kind=kind)
        points = points_in_time(ask, self._costs, workload)
        turns = self._prompts.plan(messages, rules_of(ask, self._prompts.listed, points))
        sample = turns.branch(SAMPLE_POINT, [SAMPLE_POINT], [], 1)
        turn = max(len(sample.suffix), len(turns.polish("").suffix) if ask.polish else 0)
        sizes = PlanSizes(len(turns.prefix), len(turns.skeleton.tokens), turn, turns.asked)
        return EncodedPrompt(decision, (), turns, sizes, score, kind, points)

    def _make(
        self, ask: Ask, id: str, client: str, seed: int, since: float, prompt: EncodedPrompt
    ) -> RequestState:
        model = self._config.model
        size = self._prompts.size
        told = prompt.conversation.told if prompt.conversation else None
        way = prompt.decision, prompt.score, prompt.points
        plan = ForkPlan(ask, id, seed, model, since, prompt.tags) if prompt.tags else None
        return RequestState(
            id=id,
            client=client,
            arrival=next(self._arrivals),
            ask=ask,
            seed=seed,
            plan=plan or RequestPlan(ask, id, seed, model, since, size, told, *way),
            prompt=prompt,
            home=self._home,
            since=since,
            trace=current.get() or caller.get(),
        )


def check_deadline(timeout: float | None) -> None:
    """Raises TimedOut."""
    if timeout is not None and timeout <= 0:
        raise TimedOut("the deadline had passed when the request came")
