"""A conductor on a ring of real frames: the product's sequencer, page tables and verdict, without weights.

KV holds tokens, and a row's target is what a script says behind exactly the tokens that the row can see;
where a page, a fork or a position is wrong, it sees others, and the answer is spoiled.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from specsot.core.frames import Draft, Drafts, Frame, Opening, Order, Outcome, PromptChunk, Result, tokens_of
from specsot.core.info import Info
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain
from specsot.events import Event, Numbered
from specsot.params import Ask
from specsot_master.engine import Caller, Engine, EngineConfig, RingState
from specsot_master.master import RequestCounter
from specsot_master.prompts import Prompts
from specsot_worker.core.accept import DecodeState, accept_prompt, accept_tree
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from tests.master.letters import SAYS
from tests.master.stage import BASE, END_OF_TEXT, TEXT, Ticks, flushed
from tests.worker.mock_ring import MockStage

SPOILED = 3  # a token that no script says
STATE = RingState(epoch=1, pages=96, page_rows=16, slots=8, max_positions=2048, has_drafter=True)


@dataclass
class Framed:
    """`says`: as of a Stage. flight: frames under way at most. skill: chance of a right draft."""

    says: Mapping[str, str] = field(default_factory=lambda: SAYS)
    seed: int = 0
    pages: RingState = STATE
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="demo"))
    flight: int = 1
    skill: float = 0.7

    def __post_init__(self) -> None:
        self.text, self.time = TEXT, Ticks()
        self.conductor = Engine(self, self.text, Prompts(BASE, self.text), self.config, self.time)
        self.requests = RequestCounter(self.conductor, Info)
        self.chance = random.Random(self.seed)
        table = PageTable(self.pages.pages, self.pages.page_rows)
        budget = FrameBudget(rows=64, max_in_flight=self.flight, max_tree_nodes=self.pages.slots)
        self.sequencer = Sequencer(self.pages.epoch, budget, table, DraftTimeout(0.5))
        self.stages = [MockStage(PageTable(self.pages.pages, self.pages.page_rows)) for _ in range(2)]
        self.frames: list[Frame] = []
        self.openings: dict[int, Opening] = {}
        self._flying: deque[Frame] = deque()
        self._written: dict[int, DecodeState] = {}
        self._prompts: dict[int, list[int]] = {}
        self._scripts: dict[int, list[int]] = {}
        self._now = 0.0

    # --- what the conductor sees ---

    def state(self) -> RingState | None:
        return self.pages

    async def order(self, order: Order) -> None:
        self.sequencer.apply_order(order)

    def waiting_for(self) -> str:
        return ""

    # --- steps ---

    async def settle(self) -> None:
        """Let tasks run until they wait for the ring."""
        for _ in range(3):
            await asyncio.sleep(0)
            await flushed(self.conductor)

    async def step(self) -> bool:
        """A frame goes out, or the oldest one comes back; False when nothing can move."""
        await self.settle()
        frame = self.sequencer.compose(self._now)
        if frame is not None:
            self.frames.append(frame)
            self._flying.append(frame)
        elif not self._flying and (deadline := self.sequencer.deadline()) is not None:
            self._now = max(self._now, deadline)
            return True
        if self._flying and (frame is None or len(self._flying) >= self.flight):
            self._finish(self._flying.popleft())
            await self.settle()
            return True
        return frame is not None

    async def play(self, *clients: asyncio.Task[list[Event]]) -> list[list[Event]]:
        while not all(client.done() for client in clients):
            assert await self.step() or all(client.done() for client in clients), "nothing moves"
        while await self.step():
            pass
        return [client.result() for client in clients]

    def listen(
        self, ask: Ask, id: str | None = None, client: str = "", **more: float
    ) -> asyncio.Task[list[Event]]:
        return asyncio.create_task(_collect(self.requests.generate(ask, Caller(id, client, **more))))

    def rows_of(self, sequences: set[int], since: int) -> int:
        """Rows of these sequences in frames with a number above `since`."""
        segments = (one for frame in self.frames if frame.number > since for one in frame.segments)
        return sum(len(tokens_of(one)) for one in segments if one.sequence in sequences)

    def assert_clean(self) -> None:
        """Nothing lives but kept beginnings, on all page tables alike, and their pages are counted."""
        kept = set(self.conductor.kept)
        assert self.conductor.idle
        for stage in self.stages:
            assert stage.table.sequences == kept
            assert stage.table.free >= self.pages.pages - self.conductor.prefix_pages

    # --- the ring itself ---

    def _finish(self, frame: Frame) -> None:
        seen = [stage.run(frame) for stage in self.stages]
        assert seen[0] == seen[1]
        for opening in frame.openings:
            self._open(opening)
        outcomes = [*self._judge(frame, seen[0]), *self.sequencer.rejections()]
        for sequence in frame.closings:
            self._written.pop(sequence, None)
        result = Result(frame.epoch, frame.number, tuple(outcomes), rows=len(seen[0]))
        self.sequencer.apply_result(result, self._now)
        self.conductor.handle(result)
        self._draft([one for one in outcomes if not one.end and self.openings[one.sequence].drafted])

    def _open(self, opening: Opening) -> None:
        fork = opening.fork
        self.openings[opening.sequence] = opening
        self._prompts[opening.sequence] = self._prompts[fork.sequence][: fork.length] if fork else []
        if opening.decodes:
            self._written[opening.sequence] = DecodeState(opening)

    def _judge(self, frame: Frame, seen: list[list[int]]) -> list[Outcome]:
        outcomes, first = [], 0
        for segment in frame.segments:
            rows = seen[first : first + len(tokens_of(segment))]
            first += len(rows)
            if isinstance(segment, PromptChunk):
                self._prompts[segment.sequence] += segment.tokens
            written = self._written.get(segment.sequence)
            if written is None or (isinstance(segment, PromptChunk) and not segment.final):
                continue
            targets: list[int | None] = [self._target(segment.sequence, row) for row in rows]
            if isinstance(segment, PromptChunk):
                outcome = accept_prompt(written, targets[-1])
            else:
                outcome = accept_tree(written, segment.draft_round, segment.tree, targets)
            outcomes.append(outcome)
            if outcome.end:
                self._written.pop(segment.sequence)
        return outcomes

    def _target(self, sequence: int, seen: list[int]) -> int:
        """What the script says behind what the row sees, if that is the prompt and the script so far."""
        prompt, script = self._prompts[sequence], self._script(sequence)
        said = len(seen) - len(prompt)
        if seen != [*prompt, *script[:said]]:
            return SPOILED
        return script[said] if said < len(script) else END_OF_TEXT

    def _script(self, sequence: int) -> list[int]:
        if sequence not in self._scripts:
            turn = self.text.decode(self._prompts[sequence]).rpartition("\nuser\n")[2]
            said = next(answer for piece, answer in self.says.items() if piece in turn)
            self._scripts[sequence] = [*self.text.encode(said), END_OF_TEXT]
        return self._scripts[sequence]

    def _draft(self, outcomes: list[Outcome]) -> None:
        """Chains of the script, some of whose tokens are wrong."""
        drafts = []
        for outcome in outcomes:
            script, said = self._script(outcome.sequence), len(self._written[outcome.sequence].tokens)
            ahead = [one if self.chance.random() < self.skill else SPOILED for one in script[said : said + 4]]
            tree: Tree = chain((outcome.tokens[-1], *ahead))
            drafts.append(Draft(outcome.sequence, outcome.draft_round + 1, tree))
        if drafts:
            self.sequencer.add_drafts(Drafts(self.pages.epoch, tuple(drafts)))


async def _collect(events: AsyncIterator[Numbered]) -> list[Event]:
    return [numbered.event async for numbered in events]


def free(ask: Ask) -> Ask:
    """Without a grammar: the scripts' tokens are taken as they are."""
    return replace(ask, constraint=False)
