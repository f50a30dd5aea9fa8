"""Members' parts that err on demand: a drafter that guesses, or lies, and stages that die of one request.

Around them are the product's Worker and Drafter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specsot.checkpoint.config import read_config
from specsot.core.frames import (
    Draft,
    FeatureBatch,
    Features,
    Frame,
    Opening,
    Outcome,
    Result,
    TreeSegment,
    tokens_of,
)
from specsot.core.tree import Tree
from specsot.errors import ModelError
from specsot.grammar import Grammar
from specsot.members import Configuration, Head, Range, Registration
from specsot.transport.links import Link
from specsot_drafter.drafter import Drafter
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import Verifier
from tests.simulator import MockWorker, Simulator, next_state, state_of

Lie = Literal["", "ids", "roots", "steps", "forged"]
LIES: tuple[Lie, ...] = ("ids", "roots", "steps", "forged")

# Requests are known to stages by their seed alone. What dies of these:
AT_PROMPT, AT_STEP, AT_GRAMMAR = 1001, 1002, 1003
POISONS = (AT_PROMPT, AT_STEP, AT_GRAMMAR)
STEP = 3  # the step of an epoch that AT_STEP kills


class Guesser:
    """What a DraftEngine is to its part: right with probability `skill`, unless it lies."""

    paused_trees, free_pages, awake = 0, 0, False

    def __init__(self, mock: Simulator, rng: random.Random, skill: float, nodes: int, lie: Lie) -> None:
        self._voice, self._vocabulary = mock.language_model, read_config(mock.model).vocab
        self._rng, self._skill, self._nodes, self._lie = rng, skill, nodes, lie
        self.texts: dict[int, list[int]] = {}
        self._wanted: dict[int, FeatureBatch] = {}

    def observe(self, features: Features) -> None:
        for opening in features.openings:
            source = self.texts.get(opening.fork.sequence) if opening.fork else []
            if source is not None:
                self.texts[opening.sequence] = source[: opening.fork.length if opening.fork else 0]
        for feature_batch in features.feature_batches:
            text = self.texts.get(feature_batch.sequence)
            if text is not None and len(text) >= feature_batch.start:
                text[feature_batch.start :] = feature_batch.tokens
                if feature_batch.bonus is not None and feature_batch.draft_round is not None:
                    self._wanted[feature_batch.sequence] = feature_batch
        for sequence in features.closings:
            self.texts.pop(sequence, None)
            self._wanted.pop(sequence, None)

    def begin(self) -> int:
        """Nothing runs beside what else is to be done."""
        return 0

    def finish(self) -> tuple[Draft, ...]:
        wanted, self._wanted = self._wanted, {}
        drafts = [Draft(one.sequence, one.draft_round or 0, self._tree(one)) for one in wanted.values()]
        return tuple(self._spoil(one) for one in drafts)

    def _tree(self, feature_batch: FeatureBatch) -> Tree:
        assert feature_batch.bonus is not None
        tokens, parents = [feature_batch.bonus], [0]
        states = [state_of([*self.texts[feature_batch.sequence], feature_batch.bonus])]
        for node in range(1, self._rng.randrange(1, 7) if self._nodes < 7 else self._nodes):
            parent = self._rng.randrange(max(node - 2, 0), node)
            right = self._rng.random() < self._skill
            tokens.append(self._voice.next(states[parent]) if right else self._rng.randrange(300, 800))
            parents.append(parent)
            states.append(next_state(states[parent], tokens[-1]))
        return Tree(tuple(tokens), tuple(parents))

    def _spoil(self, draft: Draft) -> Draft:
        """Every third one."""
        if not self._lie or self._rng.randrange(3):
            return draft
        tokens = draft.tree.tokens
        match self._lie:
            case "ids":
                beyond = self._vocabulary + self._rng.randrange(1 << 20)
                return replace(draft, tree=Tree((*tokens, beyond), (*draft.tree.parents, 0)))
            case "roots":
                return replace(draft, tree=Tree((tokens[0] ^ 1, *tokens[1:]), draft.tree.parents))
            case "steps":
                return replace(draft, draft_round=draft.draft_round + self._rng.randrange(1, 4))
            case _:
                return draft


@dataclass(frozen=True, slots=True)
class GuessingSource:
    """See specsot_drafter.drafter. nodes: of a tree. taps: its head wants features of three layers."""

    mock: Simulator
    name: str
    rng: random.Random
    skill: float
    nodes: int = 6
    taps: bool = False
    lie: Lie = ""

    def registration(self) -> Registration:
        mine = MockWorker(self.mock, self.name, self.name).registration()
        head = Head(self._layers, self.mock.fused) if self.taps else None
        return replace(mine, kind="drafter", row_bytes=0, head=head)

    def tap_slices(self) -> Mapping[int, Any]:
        return {layer: torch.zeros(self.mock.fused, self.mock.width) for layer in self._layers}

    def make_engine(self, configuration: Configuration) -> Any:
        return Guesser(self.mock, self.rng, self.skill, self.nodes, self.lie)

    @property
    def _layers(self) -> tuple[int, ...]:
        """As EAGLE-3 taps: near the beginning, in the middle, near the end."""
        layers = read_config(self.mock.model).layers
        return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


class Drafting(Drafter):
    """The product's. forged: what it says it heard of the last stage it tells the master."""

    uplink: Link | None = None
    guesser: Guesser | None = None

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        self.uplink = uplink
        await super().configure(configuration, uplink)
        assert self._active
        engine: Any = self._active.engine
        self.guesser = engine

    async def run_due(self) -> float | None:
        guesser = self.guesser
        if guesser and self.uplink and self._active and guesser._lie == "forged" and guesser.texts:
            await self.uplink.send(_forge(self.epoch, guesser))
        return await super().run_due()


def _forge(epoch: int, guesser: Guesser) -> Result:
    """The next word of somebody's text."""
    sequence, text = max(guesser.texts.items())
    return Result(epoch, len(text), (Outcome(sequence, 1, (0,), (666,)),))


class PoisonableStage:
    """A stage without weights that dies, as a real one would, of ids that are none, and of poison.

    die: ends the process; does not return.
    """

    def __init__(self, stage: StageRunner, vocabulary: int, die: Callable[[], None]) -> None:
        self._stage, self._vocabulary, self._die = stage, vocabulary, die
        self._poisoned: dict[int, int] = {}  # seeds by sequence
        self._steps: dict[int, int] = {}

    @property
    def table(self) -> Any:
        return self._stage.table

    @property
    def layers(self) -> Range:
        return self._stage.layers

    @property
    def uncaptured(self) -> int:
        return self._stage.uncaptured

    def tap(self, layer: int, weight: Any) -> None:
        self._stage.tap(layer, weight)

    def prompt_rows(self, rows: int) -> int:
        return self._stage.prompt_rows(rows)

    def pause_compute_timer(self) -> None:
        self._stage.pause_compute_timer()

    def capture(self) -> None:
        self._stage.capture()

    def run(self, frame: Frame) -> Frame:
        for opening in frame.openings:
            if opening.seed in POISONS:
                self._poisoned[opening.sequence] = opening.seed
        for segment in frame.segments:
            if max(tokens_of(segment)) >= self._vocabulary:
                raise IndexError("index out of range in self")  # as torch.nn.functional.embedding
            self._taste(segment.sequence, isinstance(segment, TreeSegment))
        return self._stage.run(frame)

    def _taste(self, sequence: int, grows: bool) -> None:
        seed = self._poisoned.get(sequence)
        if seed == AT_PROMPT:
            self._die()
        if seed == AT_STEP and grows:
            self._steps[sequence] = self._steps.get(sequence, 0) + 1
            if self._steps[sequence] >= STEP:
                self._die()


class PoisonableWorker(MockWorker):
    """die: as of PoisonableStage; None: of this worker nothing dies."""

    def __init__(self, mock: Simulator, name: str, die: Callable[[], None] | None) -> None:
        super().__init__(mock, name, name)
        self._size, self._end = read_config(mock.model).vocab, die

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        stage = super().make_stage(configuration, layers)
        return PoisonableStage(stage, self._size, self._end or _live)

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        judge = super().make_verifier(stage, configuration)
        judge._find_grammar = _poisonable(judge._find_grammar)
        return judge


def _live() -> None:
    """Nothing happens."""


def _poisonable(
    grammars: Callable[[Opening], Grammar | Future[Grammar] | None],
) -> Callable[[Opening], Grammar | Future[Grammar] | None]:
    def grammar(opening: Opening) -> Grammar | Future[Grammar] | None:
        if opening.seed == AT_GRAMMAR and opening.plan:
            raise ModelError("tokenizer.json: WordPiece is neither byte-level nor has byte fallback")
        return grammars(opening)

    return grammar
