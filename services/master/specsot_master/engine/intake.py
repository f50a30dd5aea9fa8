"""Validates a request and encodes its prompts before it may wait in the queue."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from bisect import bisect_left
from dataclasses import replace

from specsot.errors import InvalidRequest, NotFound, TimedOut, TooLarge
from specsot.params import MAX_NEW_TOKENS, MAX_TOKENS, Ask
from specsot.tasks import LoopTurns, start
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
from specsot_master.core.plans.forecast import Forecaster, Workload, kind_of_question
from specsot_master.core.plans.fork_plan import ALONE, FORKED, ForkPlan, may_fork
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.router import (
    MIN_PLANNED_TOKENS,
    Decision,
    decide,
    decide_question,
    question_of,
    remember_decision,
)
from specsot_master.core.plans.speculation import may_speculate
from specsot_master.core.plans.time_limit import choose, points_in_time
from specsot_master.core.plans.wording import language_of
from specsot_master.core.request import Clock, EncodedPrompt, Home, RequestState
from specsot_master.core.ring.admission import PlanSizes, position_limit
from specsot_master.core.ring.fitting import prefix_of, refit
from specsot_master.core.ring.ring_state import Caller, EngineConfig, Ring, RingState, require_ring
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.journal import JournaledRequest
from specsot_master.prompts import THREAD_CHARACTERS, Prompts, messages_of

# Characters. What a chat template adds to each message, as SmolLM2's template does.
TURN_CHARACTERS = 24


class Intake:
    """Validates requests and encodes their prompts, several requests at the same time.

    The attribute `num_validating` is the number of requests that are being validated.
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
        """Create an intake that validates no request yet.

        home: the engine that will run the requests.
        ring: the state of the ring, against whose limits requests are checked.
        prompts: makes the prompts of requests.
        forms: checks the forms (grammars) that clients give for their answers.
        clock: returns the time.
        config: how requests are treated.
        costs: the measured costs, from which time limits and forecasts are computed.
        """
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
        self._turns = LoopTurns()
        self.num_validating = 0

    def remember(self, ring: RingState) -> None:
        """Remember the ring, against whose limits requests are checked while no ring is complete. Once the
        next ring is complete, the engine checks the waiting requests again (`refit`).

        ring: sizes and limits of the running ring.
        """
        self._known = ring

    async def validate(self, ask: Ask, caller: Caller) -> tuple[Ask, EncodedPrompt, float | None]:
        """Check a request and encode its prompts. A request without a form, or whose form is valid, passes
        the last check.

        Return the request with max_new_tokens resolved if it named none, its encoded prompts, and the seconds
        that are left of the caller's timeout (None without a timeout).

        ask: what the client asks for, as it was received.
        caller: who asks: the request id that the client chose (or None), its name for fairness, and its
            timeout in seconds (None for none).

        Raises TimedOut if the timeout ends meanwhile, NotFound for an unknown model, InvalidRequest (with
        TooLarge among its kinds) for anything that is wrong with the request, Overloaded if too many new
        grammars wait, and Unavailable if there has been no ring yet.
        """
        timeout = caller.timeout
        self._check(ask, caller.request)
        started_at = self._clock.now()
        self.num_validating += 1
        try:
            async with asyncio.timeout(timeout):
                # A burst of requests would hold up the results of the ring for as long as all of them take.
                await self._turns.wait()
                prepared = caller.prepared
                if prepared:
                    remember_decision(question_of(ask), prepared.decision)
                ask, prompt = await self._fit(ask, prepared.tokens if prepared else ())
                prefix_of(ask, prompt, self._ring_to_fit())
                check_plan(ask, self._prompts.listed)
                if ask.form:
                    await self._forms.check(ask.form, caller.client, ask.limits.new_tokens)
        except TimeoutError:
            raise TimedOut("the deadline passed while the request was looked into") from None
        finally:
            self.num_validating -= 1
        left = None if timeout is None else timeout - (self._clock.now() - started_at)
        check_deadline(left)
        return ask, prompt, left

    async def _fit(self, ask: Ask, encoded: tuple[int, ...]) -> tuple[Ask, EncodedPrompt]:
        """Return a request with its prompts encoded. A request that names no limit gets its endpoint's
        default, or as many tokens as the model's context and the ring's KV pages hold after the prompt. The
        returned request always has a max_new_tokens that the journal can keep, but for an endpoint's usual
        default.

        ask: what the client asks for, after `_check`.
        encoded: the prompt of a direct answer if it is encoded already, else ().

        Raises what `_encode` raises. A request that does not fit even with one token is returned, and refused
        by the check that follows.
        """
        prompt = await self._encode(ask, position_limit(ask, self._ring_to_fit()), encoded)
        if ask.limits.max_new_tokens is not None:
            return ask, prompt
        usual = ask.limits.new_tokens
        if (tokens := self._room(ask, prompt, usual)) == usual:
            # The journal and other masters know only max_new_tokens, not the default of an endpoint.
            return (ask if usual == MAX_NEW_TOKENS else limited(ask, usual)), prompt
        if prompt.conversation is not None:
            # With fewer tokens the plan asks for fewer points, or a direct answer replaces the plan.
            prompt = await self._encode(limited(ask, tokens))
            if prompt.conversation is None:
                tokens = self._room(ask, prompt, MIN_PLANNED_TOKENS - 1)
        return limited(ask, tokens), prompt

    def _room(self, ask: Ask, prompt: EncodedPrompt, max_tokens: int) -> int:
        """Return how many tokens fit after a prompt into the context and the ring's KV pages, 1 to
        `max_tokens`. Return 1 if not even one token fits; the later check then reports the error. An error of
        the request that is not about its size counts as fitting here.

        Binary search for the largest limit that does not raise TooLarge:
        # range(1, max_tokens) holds the limits 1, 2, ...; if limit 300 is the first that exceeds, bisect_left
        # returns its index 299, which equals the largest limit that fits

        ask: what the client asks for; its KV policy is used.
        prompt: the request's prompts in tokens.
        max_tokens: the largest limit that is of interest, in tokens.
        """
        ring = self._ring_to_fit()
        # A copy is validated in time proportional to its prompt, and each probe below makes a copy.
        bare = replace(ask, prompt="-", messages=(), tokens=(), min_tokens=0)

        def exceeds(count: int) -> bool:
            """Return True if an answer of so many tokens does not fit.

            count: the limit of the answer, in tokens.
            """
            try:
                prefix_of(limited(bare, count), prompt, ring)
            except TooLarge:  # ContextLengthExceeded is a subclass.
                return True
            except InvalidRequest:  # The final check raises this error with the resolved limit.
                pass
            return False

        return (
            max(bisect_left(range(1, max_tokens), True, key=exceeds), 1)
            if exceeds(max_tokens)
            else max_tokens
        )

    def build(self, ask: Ask, caller: Caller, now: float, prompt: EncodedPrompt) -> RequestState:
        """Create the state of a validated request; a request without an id or seed gets random ones. The
        request's pages are measured for the present ring, or for the last one.

        ask: what the client asks for, with max_new_tokens resolved.
        caller: who asks: the request id that the client chose, if it did, its name for fairness, and the
            owner.
        now: the arrival time, in seconds of the engine's clock.
        prompt: the request's prompts in tokens.

        Raises InvalidRequest if the request can never fit the ring, and Unavailable if there has been no ring
        yet.
        """
        id = caller.request or secrets.token_hex(8)
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        request = self._make(ask, id, caller.client, seed, now, prompt)
        request.owner = caller.owner
        refit(request, self._ring_to_fit())
        return request

    async def rebuild(self, journaled: JournaledRequest, since: float) -> RequestState:
        """Create the initial state of a journaled request; the caller then replays its records. It keeps its
        id, client, seed and owner; whether it fits the ring is checked later.

        journaled: the request as the journal keeps it.
        since: the arrival time, in seconds of this engine's clock; it may be negative.

        Raises InvalidRequest if the prompts cannot be encoded; ContextLengthExceeded is such an error.
        """
        prompt = await self._encode(journaled.ask)
        request = self._make(journaled.ask, journaled.id, journaled.client, journaled.seed, since, prompt)
        request.owner = journaled.owner
        return request

    def has_prompt(self, request: RequestState, command: OpenBranch) -> bool:
        """Return True if a branch's prompt is encoded already, or short enough to be encoded on the event
        loop. If not, a thread encodes the prompt, once, and the request's engine receives `PromptMade`. Short
        means fewer than THREAD_CHARACTERS characters.

        request: the request that opens the branch.
        command: the command that opens the branch.
        """
        if request.unmade(command) < THREAD_CHARACTERS:
            return True
        if (request, command.point.id) not in self._making:
            start(self._make_turn(request, command))
        return False

    async def _make_turn(self, request: RequestState, command: OpenBranch) -> None:
        """Encode a branch's prompt in a thread, then send `PromptMade` to the request's engine, with the
        error if there was one. While it runs, `has_prompt` starts no second thread for the same branch.

        request: the request that opens the branch.
        command: the command that opens the branch.
        """
        one = (request, command.point.id)
        failure = None
        self._making.add(one)
        try:
            await asyncio.to_thread(request.branch_turn, command)
        except Exception as error:
            failure = error
        self._making.discard(one)
        request.home.handle(PromptMade(request, failure))

    def _check(self, ask: Ask, id: str | None) -> None:
        """Make the checks that need no encoded prompt. The checks are those of the model's name, the sizes,
        the plan, the token ids, the drafter, and of windows, pruning and `head_aware`, which need a model
        whose layers and measurements allow them.

        Return nothing if the request passes.

        ask: what the client asks for.
        id: the request id that the client chose, or None.

        Raises NotFound for an unknown model, Unavailable if there has been no ring yet, and InvalidRequest.
        """
        model = self._config.model
        ring = self._ring_to_fit()
        if ask.model not in ("", model):
            raise NotFound(f"no model named {ask.model!r} here, only {model!r}")
        check_sizes(ask, id, position_limit(ask, ring))
        check_plan(ask, self._prompts.listed)
        check_tokens(ask, self._config.vocabulary)
        check_drafter(ask, ring.drafters)
        if (ask.policy or ask.head_aware) and not self._config.allows_policies:
            raise InvalidRequest(
                f"windows, pruning, head_aware: {model!r} has gated delta layers, layers without rotary"
                " positions or latent attention, for which there are none"
            )
        if ask.window and self._config.transformers:
            raise InvalidRequest(
                f"window: layers of {model!r} run through Transformers, which turns queries once only",
                "window",
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
        """Return the state of the running ring, or of the last one that ran. Raises Unavailable if there was
        none.
        """
        return self._ring.state() or self._known or require_ring(self._ring)

    async def _encode(
        self, ask: Ask, positions: int = MAX_TOKENS, encoded: tuple[int, ...] = ()
    ) -> EncodedPrompt:
        """Return a request's prompts in tokens; long ones are encoded in a thread, so that the event loop is
        not blocked. The length is checked only for prompts that are encoded in a thread.

        ask: what the client asks for.
        positions: the maximum prompt length in tokens, by which a far too long prompt is refused before it is
            tokenized.
        encoded: the prompt of a direct answer if it is encoded already, else ().

        Raises InvalidRequest if the template refuses the conversation, and ContextLengthExceeded.
        """
        if encoded or prompt_characters(ask) + TURN_CHARACTERS * len(ask.messages) < THREAD_CHARACTERS:
            return self._decide_and_encode(ask, encoded)
        await asyncio.to_thread(self._prompts.check_fits, ask, positions)
        return await asyncio.to_thread(self._decide_and_encode, ask)

    def _decide_and_encode(self, ask: Ask, encoded: tuple[int, ...] = ()) -> EncodedPrompt:
        """Decide whether the request is answered directly or by a plan, and return the prompts of that way.
        For a direct answer, `answer` of the result holds the prompt and `conversation` is None; for a plan,
        `answer` is empty and `conversation` holds the prompts. A model with fork tags answers directly if the
        request does not allow forks. The decision may be reversed by the client's time limit. The score's
        prompt is made only if the decision has a threshold, and the sizes of a plan are measured with a
        sample branch.

        A model that forks by its own tags gets the chat prompt with an open thinking block, if the request
        allows forks. Tokens given in place of messages are used as they are.

        ask: what the client asks for.
        encoded: the prompt of a direct answer if it is encoded already, else ().

        Raises InvalidRequest if the template refuses the conversation, or if not even a sentence can end
        within the client's time limit.
        """
        messages = messages_of(ask)
        if (tags := self._prompts.tags) and may_fork(ask):
            return EncodedPrompt(FORKED, ask.tokens or self._prompts.thinking(messages), tags=tags)
        decision = decide(ask, messages, not self._prompts.listed, self._prompts.threshold)
        decision = Decision("direct", ALONE) if tags and decision.mode != "direct" else decision
        question = messages[-1].content if messages else ""
        reason = decide_question(question).reason
        kind = kind_of_question(reason, language_of(question)) if messages else ""
        # Nothing is tokenized yet; about four characters make a token.
        workload = Workload(prompt_characters(ask) // 4, ask.limits, kind=kind)
        decision = choose(decision, ask, self._costs, workload)
        score = self._prompts.score(messages) if decision.threshold is not None else None
        if decision.mode == "direct":
            answer = ask.tokens or encoded or self._prompts.chat(messages)
            return EncodedPrompt(decision, answer, kind=kind)
        points = points_in_time(ask, self._costs, workload)
        both = self._prompts.listed and may_speculate(ask)
        turns = self._prompts.plan(messages, rules_of(ask, self._prompts.listed, points, both))
        turn = max(len(turns.sample.suffix), len(turns.polish("").suffix) if ask.polish else 0)
        sizes = PlanSizes(len(turns.prefix), len(turns.skeleton.tokens), turn, turns.asked, both)
        return EncodedPrompt(decision, (), turns, sizes, score, kind, points, speculates=both)

    def _make(
        self, ask: Ask, id: str, client: str, seed: int, since: float, prompt: EncodedPrompt
    ) -> RequestState:
        """Create the state of a request, with the plan that its prompt calls for. The plan is a ForkPlan for
        a prompt with fork tags, else a RequestPlan. The arrival number counts up with every call, and the
        trace is that of the call that runs now, if any.

        ask: what the client asks for.
        id: the request's id.
        client: the name of its client.
        seed: its sampling seed.
        since: the arrival time, in seconds of the engine's clock.
        prompt: the request's prompts in tokens.
        """
        model = self._config.model
        size = self._prompts.size
        instructions = prompt.conversation.instructions if prompt.conversation else None
        planning = (
            prompt.decision,
            prompt.score,
            prompt.points,
            prompt.speculates,
            self._prompts.wording.lengths_of(question_of(ask)),
            self._prompts.wording.paragraph_tokens,
            self._prompts.style == "markers" and self._prompts.listed,
            self._prompts.beginnings,
        )
        plan = ForkPlan(ask, id, seed, model, since, prompt.tags) if prompt.tags else None
        return RequestState(
            id=id,
            client=client,
            arrival=next(self._arrivals),
            ask=ask,
            seed=seed,
            plan=plan or RequestPlan(ask, id, seed, model, since, size, instructions, *planning),
            prompt=prompt,
            home=self._home,
            since=since,
            trace=current.get() or caller.get(),
        )


def check_deadline(timeout: float | None) -> None:
    """Raise TimedOut if a timeout is zero or negative.

    timeout: seconds from now; None is no deadline.
    """
    if timeout is not None and timeout <= 0:
        raise TimedOut("the deadline had passed when the request came")
