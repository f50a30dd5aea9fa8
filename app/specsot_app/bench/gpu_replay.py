"""A ring of one GPU whose drafter knows the text, errs as a published head does, and costs what it costs.

Refuses to know what is measured with it. The head runs beside for its true cost, on the true features; its
candidates are thrown away, and the known text with mistakes takes their places, scores and all. Everything
else is as in a fleet of one: frames, graphs, verification by the model's own argmax, pages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

import numpy as np
import torch
from torch import Tensor

from specsot.frames import Close, Drafts, Features, Fork, Frame, Growth, Open, Opening, Result
from specsot.members import Configuration, Curve, TreeShape
from specsot.model.decoder import Decoder
from specsot.pages import PageTable
from specsot.params import Sampling
from specsot_app.bench.shapes import MadeUp
from specsot_drafter.drafters.eagle import EagleDrafter
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.rules import rule_of
from specsot_drafter.selection import Deserves, Offer
from specsot_drafter.texts import Text
from specsot_worker.features import FeatureStore
from specsot_worker.patience import Patience
from specsot_worker.sequencer import Budget, Sequencer
from specsot_worker.stage import Stage
from specsot_worker.verdict import LastStage

EPOCH, PAGE = 1, 64
PLENTY = 1 << 20  # tokens a sequence may write: none ends by its limit
WARM = 6  # laps that are not told
FAINT = 1e-4  # of their usual size: what layers add, so that a token says which one follows
CHANCES = (0.62, 0.14, 0.07, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.005)  # of a node's children, best first
STEP = 7919  # a prime: far from the right token, and never it


class Telling(MadeUp):
    """Weights of the right sizes with which every token says the next: its number and one more.

    What layers add is small, and lm_head is the embedding moved by one row.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        made = super().expect(name, shape, dtype, device)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made *= FAINT
        if name.endswith("embed_tokens.weight"):
            self._table = made
        if name.endswith("lm_head.weight") and self._table is not None and self._table.shape == made.shape:
            made.copy_(self._table.roll(1, 0))
        return made


class Replay:
    """See `Drafter`. What an EAGLE head would draft if it were right as often as `rates` says."""

    def __init__(self, inner: EagleDrafter, rates: Sequence[float], vocabulary: int, k: int) -> None:
        """rates: chance that level 1, 2, ... holds the right token, where the level above did."""
        self.widths, self._inner = inner.widths, inner
        self._rates, self._vocabulary, self._k = rates, vocabulary, k
        self._dice = random.Random(11)

    @property
    def free_pages(self) -> int:
        return self._inner.free_pages

    def due(self, texts: Sequence[Text]) -> int:
        return self._inner.due(texts)

    def open(self, text: Text) -> None:
        self._inner.open(text)

    def hear(self, batch: Features) -> None:
        self._inner.hear(batch)

    def close(self, sequence: int) -> None:
        self._inner.close(sequence)

    def most_levels(self, text: Text) -> int:
        return self._inner.most_levels(text)

    def catch_up(self) -> None:
        self._inner.catch_up()

    def offer(self, texts: Sequence[Text], levels: int, deserves: Deserves | None = None) -> Offer | None:
        """The head's own offer, for its time; then the known one."""
        real = self._inner.offer(texts, levels, deserves)
        if real is None:
            return None
        known = grown(self._k, real.levels)
        tokens = np.stack([self._tokens(text.tokens[-1], known) for text in texts])
        many = (len(texts), 1)
        return Offer(tokens, np.tile(known.scores, many), np.tile(known.parents, many), known.depths)

    def _tokens(self, root: int, bush: Bush) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The right tokens on the first path as deep as the dice say; wrong ones everywhere else."""
        right = 0
        while right < len(bush.path) and self._dice.random() < self._rates[right]:
            right += 1
        tokens = root + bush.depths + STEP * (1 + bush.ranks)
        tokens[list(bush.path[:right])] = root + 1 + np.arange(right)
        return tokens % self._vocabulary


@dataclass(frozen=True, slots=True)
class Bush:
    """A tree's candidates without tokens, as `Offer` has them. path: the likeliest; ranks: among siblings."""

    scores: np.ndarray[tuple[int], np.dtype[np.float64]]
    parents: np.ndarray[tuple[int], np.dtype[np.int64]]
    depths: np.ndarray[tuple[int], np.dtype[np.int64]]
    ranks: np.ndarray[tuple[int], np.dtype[np.int64]]
    path: tuple[int, ...]


@cache
def grown(k: int, levels: int) -> Bush:
    """As EAGLE-2 grows: the k best of a level have k children each, with CHANCES."""
    chances = np.log(np.array(CHANCES[:k]))
    scores, parents, depths, path = [chances], [np.zeros(k, np.int64)], [np.ones(k, np.int64)], [0]
    fed, first = np.arange(k), 0
    for level in range(1, levels):
        above = scores[-1][fed]
        path.append(first + len(scores[-1]))
        parents.append((first + fed + 1).repeat(k))
        first += len(scores[-1])
        scores.append((above[:, None] + chances).reshape(-1))
        depths.append(np.full(k * k, level + 1))
        fed = np.argsort(-scores[-1], kind="stable")[:k]
    whole = np.concatenate(scores)
    return Bush(
        whole,
        np.concatenate(parents),
        np.concatenate(depths),
        np.arange(len(whole)) % k,
        tuple(path),
    )


def rates_of(tau: float, levels: int) -> tuple[float, ...]:
    """The same chance for every level, so that a lap brings `tau` tokens on average, with the bonus one."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if 1 + sum(rate**n for n in range(1, levels + 1)) < tau else (low, rate)
    return (low,) * levels


@dataclass(slots=True)
class Clock:
    """Wall seconds of a run, by who spent them; tokens that were written, laps."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    laps: int = 0
    rows: int = 0

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def at(self, what: str) -> Generator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a run drafts. curve: of the stage, where a tuner is to decide how much."""

    head: DraftHead
    shape: TreeShape
    rates: Sequence[float]
    curve: Curve = ()
    level: Curve = ()


class Ring:
    """One stage with its graphs, and a drafter or none; runs are measured one after the other."""

    def __init__(self, decoder: Decoder, pages: int, rows: int, drafting: Drafting | None) -> None:
        """rows: of a frame at most."""
        self._decoder, self._pages, self._rows, self._drafting = decoder, pages, rows, drafting
        self.stage, self._drafter = Stage(decoder, pages, PAGE), None
        if drafting:
            for layer, weight in drafting.head.tap_slices().items():
                self.stage.tap(layer, weight)
            inner = EagleDrafter(drafting.head, drafting.shape, pages, PAGE)
            self._drafter = Replay(inner, drafting.rates, decoder.config.vocab, drafting.shape.top_k)
        self.stage.prepare()
        self._ids = count(1)

    def run(
        self, text: int, sequences: int, laps: int, forked: bool = False, nodes: int | None = None
    ) -> Clock:
        """So many sequences write for so many laps, each behind `text` rows of its own, or all behind the
        same ones where `forked`; then they are closed. WARM laps before are not told.

        nodes: of a tree at most, where that is not the shape's.
        """
        turning = self._turning(nodes)
        orders = list(_orders(self._ids, text, sequences, forked, self._drafting is not None))
        for order in orders:
            turning.sequencer.obey(order)
        clock = Clock()
        while clock.laps < laps + WARM:
            if clock.laps == WARM and not clock.tokens:
                clock = Clock(laps=WARM)
            fed, result = turning.turn(clock)
            if sum(isinstance(each, Growth) for each in fed.segments) == sequences:
                clock.laps += 1
                clock.rows += result.rows
                clock.tokens += sum(len(one.tokens) for one in result.outcomes) if clock.laps > WARM else 0
            else:
                clock.seconds.clear()
        for order in reversed(orders):
            turning.sequencer.obey(Close(order.opening.sequence))
        turning.turn(Clock())
        clock.laps -= WARM
        return clock

    def _turning(self, nodes: int | None) -> Turning:
        """A new start over the same pages and graphs."""
        drafting, decoder = self._drafting, self._decoder
        table = PageTable(self._pages, PAGE)
        if drafting is None or self._drafter is None:
            sequencer = Sequencer(EPOCH, Budget(self._rows, 1, 1), table, Patience(0.0, False))
            return Turning(self.stage, LastStage(decoder.logits, lambda _: None), sequencer, None)
        shape = replace(drafting.shape, nodes=nodes or drafting.shape.nodes)
        configuration = Configuration(
            EPOCH,
            "drafter",
            (),
            self._pages,
            PAGE,
            shape.slots,
            self._rows,
            shape=shape,
            curve=drafting.curve,
        )
        rule = rule_of("measured", shape, drafting.curve, drafting.level, self._drafter.widths)
        engine = DraftEngine({"eagle": (self._drafter, rule)}, configuration)
        sequencer = Sequencer(EPOCH, Budget(self._rows, 1, shape.slots), table, Patience(0.0, True))
        store = FeatureStore(self._pages, PAGE, drafting.head.width, decoder.dtype, decoder.device)
        return Turning(self.stage, LastStage(decoder.logits, lambda _: None, store), sequencer, engine)


@dataclass(frozen=True, slots=True)
class Turning:
    """Everything that lives for one run."""

    stage: Stage
    judge: LastStage
    sequencer: Sequencer
    engine: DraftEngine | None

    def turn(self, clock: Clock) -> tuple[Frame, Result]:
        """One lap."""
        with clock.at("compose"):
            frame = self.sequencer.compose(0.0)
        assert frame is not None
        with clock.at("verify"):
            verdict = self.judge.judge(self.stage.run(frame))
        with clock.at("compose"):
            self.sequencer.learn(verdict.result, 0.0)
        if self.engine is not None:
            with clock.at("learn"):
                for features in verdict.features:
                    self.engine.learn(features)
            with clock.at("draft"):
                drafts = Drafts(EPOCH, self.engine.draft(), self.engine.rest)
            with clock.at("compose"):
                self.sequencer.offer(drafts)
        return frame, verdict.result


def _orders(ids: Iterator[int], text: int, sequences: int, forked: bool, drafted: bool) -> Iterator[Open]:
    """A prompt for each; or one that never writes, and forks of it, which begin with a token of their own."""
    source, greedy = None, Sampling(temperature=0.0)
    if forked:
        source = next(ids)
        yield Open(Opening(source, text, decodes=False, drafted=drafted), tuple(range(text)), PLENTY)
    for number in range(sequences):
        start = 1 + 100 * number
        tokens = (start,) if forked else tuple(range(start, start + text))
        fork = None if source is None else Fork(source, text)
        more = {"sampling": greedy, "limit": PLENTY, "drafted": drafted}
        opening = Opening(next(ids), text + forked, fork, **more)  # type: ignore[arg-type]
        yield Open(opening, tokens, PLENTY)
