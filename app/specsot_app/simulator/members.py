"""A worker and a drafter without weights, as a fleet takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specsot.core.frames import Opening
from specsot.core.vocabulary import read_vocabulary
from specsot.grammar import Grammar, grammar_of
from specsot.members import Configuration, Curve, Head, Range, Registration, TreeShape
from specsot.model.config import read_config
from specsot.model.fingerprint import fingerprint
from specsot.transport.links import Dialer
from specsot_app.simulator.fake_lm import FakeLM, OracleDrafter
from specsot_app.simulator.stage import MockStage, StageModel
from specsot_drafter.core.cost_model import RowCurve
from specsot_drafter.core.tree_budget import make_budget
from specsot_drafter.drafter import Drafter
from specsot_drafter.engine import DraftEngine
from specsot_master.text import Text
from specsot_worker.feature_stream import FeatureStore
from specsot_worker.observer import WorkerObserver
from specsot_worker.stage import StageRunner
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker

Sleep = Callable[[float], object]
FREE: Curve = ((1, 1e-5), (64, 1e-5))  # next to nothing, but not nothing: costs are divided


@dataclass(frozen=True, slots=True)
class Simulator:
    """A ring without weights.

    model: whose tokenizer and number of layers. kv_memory: bytes of each member; a row takes 256 a layer.
    layer: seconds per rows of one layer; growth: of one level of all trees. sleep: how they are spent.
    plan: what it writes as a skeleton; empty: the grammar's first choices. See `plan_of`.
    skill: how often a drafted token is right behind right ones; its scores say the same.
    width, fused: of hidden and fused rows, fp32; taps as those of a head of this model.
    """

    model: Path
    voice: FakeLM = field(default_factory=FakeLM)
    plan: tuple[int, ...] = ()
    layer: Curve = FREE
    growth: Curve = FREE
    sleep: Sleep = time.sleep
    skill: float = 0.8
    shape: TreeShape = field(default_factory=TreeShape)
    width: int = 3
    fused: int = 3
    kv_memory: int = 1 << 28

    def worker(
        self, name: str, address: str, dialer: Dialer, compute: Executor, watch: WorkerObserver | None = None
    ) -> Worker:
        return Worker(MockWorker(self, name, address), dialer, compute, observer=watch)

    def drafter(self, name: str, address: str, dialer: Dialer, compute: Executor) -> Drafter:
        return Drafter(MockDrafter(self, name, address), dialer, compute)


def plan_of(model: Path, points: int, length: int) -> tuple[int, ...]:
    """A skeleton of so many points, `length` tokens wished for each, as the model's tokenizer spells it."""
    lines = [f"{n}.<{length}><None>[-]Point {n}\n" for n in range(1, points + 1)]
    return Text(model).encode_bare("[PLAN]\n" + "".join(lines) + "[END]")


class MockWorker:
    """See specsot_worker.stage."""

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        self._mock, self.name, self._address = mock, name, address
        self.loaded = 0
        self.vocabulary = read_config(mock.model).vocab

    def registration(self) -> Registration:
        return _registration(self._mock, "worker", self.name, self._address, self._mock.layer)

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        mock, layer = self._mock, RowCurve(self._mock.layer)

        def spend(rows: int) -> None:
            mock.sleep(float(layer.at(rows)) * len(layers))

        body = StageModel(mock.voice, spend, mock.width, mock.plan)
        return MockStage(body, layers, configuration.pages, configuration.page_rows)

    def preload(self) -> bool:
        return False

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        size = read_config(self._mock.model).vocab
        vocabulary = read_vocabulary(self._mock.model, size)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(hidden), size).scatter_(1, hidden[:, 2:3].long(), 1.0)

        def grammar(opening: Opening) -> Future[Grammar] | None:
            return grammar_of(vocabulary, opening) if opening.plan or opening.form else None

        pages, width = (configuration.pages, configuration.page_rows), configuration.width_at(stage.layers)
        store = FeatureStore(*pages, width, torch.float32, "cpu") if width else None
        return Verifier(logits, grammar, store)


class MockDrafter:
    """See specsot_drafter.drafter."""

    def __init__(self, mock: Simulator, name: str, address: str) -> None:
        self._mock, self.name, self._address = mock, name, address

    def registration(self) -> Registration:
        mock = self._mock
        return _registration(
            mock,
            "drafter",
            self.name,
            self._address,
            mock.growth,
            head=_head(mock),
            drafters=("eagle",),
            shape=mock.shape,
        )

    def tap_slices(self) -> Mapping[int, Any]:
        head = _head(self._mock)
        return {layer: torch.zeros(head.width, self._mock.width) for layer in head.taps}

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        mock, level = self._mock, RowCurve(self._mock.growth)

        def spend(rows: int) -> None:
            mock.sleep(float(level.at(rows)))

        drafter = OracleDrafter(mock.voice, mock.skill, mock.shape.depth, spend, configuration.pages)
        rule = make_budget("measured", configuration.shape, configuration.curve, mock.growth, drafter.widths)
        vocabulary = read_vocabulary(mock.model, read_config(mock.model).vocab)
        return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary)


def _head(mock: Simulator) -> Head:
    """As EAGLE-3 taps: near the beginning, in the middle, near the end."""
    layers = read_config(mock.model).layers
    taps = sorted({min(2, layers), layers // 2, max(layers - 3, 0)})
    return Head(tuple(taps), mock.fused)


def _registration(
    mock: Simulator, kind: Any, name: str, address: str, curve: Curve, **more: Any
) -> Registration:
    config = read_config(mock.model)
    return Registration(
        kind=kind,
        name=name,
        address=address,
        fingerprint=fingerprint(mock.model),
        model_layers=config.layers,
        max_positions=config.max_positions,
        kv_bytes=mock.kv_memory,
        row_bytes=256,
        curve=curve,
        **more,
    )
