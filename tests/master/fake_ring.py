"""A ring without a model: it plays scripts, in steps of any interleaving, and holds the master to the rules.

A script says which tokens a sequence writes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from specsot.core.frames import (
    Close,
    End,
    Lease,
    Logprob,
    Open,
    Opening,
    Order,
    Outcome,
    PrefixProgress,
    Result,
)
from specsot.core.pages import PageTable
from specsot.errors import Unavailable
from specsot_master.engine import RingState
from specsot_model.core.kv_plan import open_sequence

Script = Callable[[Opening, tuple[int, ...]], tuple[int, ...]]

STATE = RingState(epoch=1, pages=64, page_rows=64, slots=8, max_positions=2048, has_drafter=True)


def chance_of(token: int, top: int | None) -> Logprob:
    """What this ring finds likely: every token by its number, the next ones in its place."""
    return Logprob(-token / 1000, tuple((token + n, -(token + n) / 1000) for n in range(top or 0)))


@dataclass
class Player:
    """One sequence being played. `to_write`: what the script still wants to write. `reported`: how many
    tokens of a prefix results have said to be computed.
    """

    opening: Opening
    prompt: tuple[int, ...]
    lease: int
    to_write: list[int]
    written: list[int] = field(default_factory=list)
    draft_round: int = 0
    reported: int = 0

    @property
    def committed(self) -> int:
        return len(self.prompt) - self.opening.generated + max(len(self.written) - 1, 0)

    @property
    def ready(self) -> bool:
        return self.opening.decodes and self.committed < self.lease


class FakeRing:
    """Its own page table must never run dry: what the master opens, fits.

    grammar: for a constrained sequence, whether these tokens end it.
    """

    def __init__(
        self,
        script: Script,
        grammar: Callable[[list[int]], bool],
        seed: int = 0,
        state: RingState = STATE,
        burst: int = 4,
    ) -> None:
        self.now: RingState | None = state
        self.orders: list[Order] = []
        self.live: dict[int, Player] = {}
        self.most_live = 0
        self.news = asyncio.Event()
        self._script, self._grammar, self._burst = script, grammar, burst
        self._random = random.Random(seed)
        self._table = PageTable(state.pages, state.page_rows)
        self._slots = state.slots
        self._newest = 0
        self._steps = 0

    def break_off(self) -> None:
        """It loses a member, and everything with it."""
        self.now = None
        self.live.clear()

    def form(self, state: RingState) -> None:
        """It is complete again, and empty."""
        self.now, self._table = state, PageTable(state.pages, state.page_rows)

    @property
    def free_pages(self) -> int:
        return self._table.free

    def state(self) -> RingState | None:
        return self.now

    def waiting_for(self) -> str:
        return "" if self.now else "1 of 2 workers"

    async def order(self, order: Order) -> None:
        if self.now is None:
            raise Unavailable("the ring broke")
        self.orders.append(order)
        self.news.set()
        match order:
            case Open():
                self._open(order)
            case Close(sequence):
                self._close(sequence)
            case Lease(sequence, position):
                if player := self.live.get(sequence):
                    player.lease = max(player.lease, position) if player.opening.decodes else position

    def step(self) -> Result | None:
        """One step with some of the sequences that are ready; None when none is."""
        ready = [player for player in self.live.values() if player.ready]
        if not ready or self.now is None:
            return None
        chosen = self._random.sample(ready, self._random.randint(1, len(ready)))
        self._steps += 1
        outcomes = tuple(self._write(player) for player in chosen)
        return Result(
            self.now.epoch, self._steps, outcomes, rows=len(chosen), prefixes=tuple(self._computed_prefixes())
        )

    def _computed_prefixes(self) -> Iterator[PrefixProgress]:
        """Prefixes are computed at once, up to their leases; each is reported with the next step."""
        for sequence, player in self.live.items():
            computed = min(player.lease, len(player.prompt))
            if not player.opening.decodes and computed > player.reported:
                player.reported = computed
                yield PrefixProgress(sequence, computed)

    def _open(self, order: Open) -> None:
        opening = order.opening
        assert opening.sequence > self._newest, "sequence ids are never reused"
        self._newest = opening.sequence
        shared: tuple[int, ...] = ()
        if fork := opening.fork:
            shared = self.live[fork.sequence].prompt[: fork.length]
            assert len(shared) == fork.length, "forked further than the prefix goes"
        prompt = shared + order.tokens
        assert order.tokens, "a sequence needs a token of its own"
        assert len(prompt) == opening.prompt
        open_sequence(self._table, opening)
        asked = prompt[: len(prompt) - opening.generated]
        written, script = list(prompt[len(asked) :]), list[int]()
        if opening.decodes:
            script = list(self._script(opening, asked))
            assert script[: len(written)] == written, "it goes on where it was"
        player = Player(opening, prompt, order.lease, script[len(written) :], written)
        self.live[opening.sequence] = player
        slots = self._slots if opening.decodes else 0
        limit = opening.limit if opening.decodes else 0
        self._table.reserve(opening.sequence, len(asked) + limit + slots)
        self.most_live = max(self.most_live, sum(one.opening.decodes for one in self.live.values()))

    def _close(self, sequence: int) -> None:
        if self.live.pop(sequence, None):
            self._table.close(sequence)

    def _write(self, player: Player) -> Outcome:
        opening, tokens, end = player.opening, list[int](), None
        burst = self._random.randint(1, self._burst) if player.draft_round else 1
        while end is None and len(tokens) < burst:
            tokens.append(player.to_write.pop(0) if player.to_write else 0)
            player.written.append(tokens[-1])
            end = self._end(player)
        accepted = tuple(range(len(tokens))) if player.draft_round else ()
        chances = tuple(chance_of(token, opening.logprobs) for token in tokens)
        told = () if opening.logprobs is None else chances
        outcome = Outcome(opening.sequence, player.draft_round, accepted, tuple(tokens), end, told)
        if opening.prompt_logprobs is not None and not player.draft_round:
            assert not opening.fork, "rows of a prompt that is shared are not computed"
            read = (chance_of(token, opening.prompt_logprobs) for token in player.prompt[1:])
            outcome = replace(outcome, prompt_chances=tuple(read))
        player.draft_round += 1
        if end:
            self._close(opening.sequence)
        return outcome

    def _end(self, player: Player) -> End | None:
        opening = player.opening
        if player.written[-1] in opening.stop_ids and len(player.written) > opening.min_tokens:
            return End.STOP
        if opening.plan and self._grammar(player.written):
            return End.GRAMMAR
        return End.LENGTH if len(player.written) == opening.limit else None
