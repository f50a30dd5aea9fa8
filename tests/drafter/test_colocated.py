"""The handle of drafts that a verifier on the same thread asks for: `DraftHandle`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsot.core.deadline import Deadline
from specsot.core.device_verification import ColocatedDrafter, DeviceVerification, DraftHandle
from specsot.core.frames import Draft, Features, TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.tree import single
from specsot.members import Configuration
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.drafter import Drafter
from specsot_drafter.epoch import DrafterEpoch
from specsot_drafter.observer import DrafterObserver
from specsot_drafter.overlap.colocated import ColocatedHandle

EPOCH = 3
FEATURES = (Features(EPOCH, 1),)
DRAFT = Draft(1, 2, single(7))


class Engine:
    """See `DraftEngine`: it drafts one root, and records what it is asked for."""

    paused_trees, awake = 0, False

    def __init__(self) -> None:
        self.asked = list[str]()
        self.failing = ""

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.failing:
            raise ValueError("a defect of the drafter")

    def start_growth(self, verification: DeviceVerification) -> AsyncGrowth:
        self._ask("start")
        return AsyncGrowth(frozenset(tree.sequence for tree in verification.trees))

    def select(self, segments: Any) -> Any:
        self._ask("select")
        return SimpleNamespace(nodes=2, confirmed=False)

    def observe(self, batch: Features) -> None:
        self._ask("observe")

    def begin(self) -> int:
        self._ask("begin")
        return 0

    def finish(self) -> tuple[Draft, ...]:
        self._ask("finish")
        return (DRAFT,)


def verification(epoch: int = EPOCH) -> DeviceVerification:
    return DeviceVerification(
        epoch, (TreeSegment(1, 1, 4, (), single(5)),), torch.zeros(1), torch.zeros(1, 1)
    )


def handle_of(
    engine: Engine, given: DeviceVerification | None = None, current: bool = True
) -> tuple[DraftHandle, DrafterEpoch]:
    configuration = Configuration(EPOCH, "d", (), 4, 4, 2, 8)
    epoch = DrafterEpoch("d", configuration, engine, None, Deadline(()))  # type: ignore[arg-type]
    return ColocatedHandle(epoch, lambda: current, DrafterObserver(), given), epoch


def test_a_drafter_is_found_by_the_one_method_of_the_protocol() -> None:
    assert issubclass(Drafter, ColocatedDrafter)


def test_without_a_result_on_the_device_nothing_grows_before_the_features_are_known() -> None:
    engine = Engine()
    handle, _ = handle_of(engine)
    assert (handle.state, engine.asked) == (OverlapState.IDLE, [])
    meanwhile = list[str]()
    result = handle.result(FEATURES, lambda: meanwhile.extend(engine.asked))
    assert result
    assert result[0].drafts == (DRAFT,)
    assert meanwhile == ["observe", "begin"], "it is called while the device grows the trees"
    assert engine.asked == ["observe", "begin", "finish"]


def test_trees_grow_from_a_result_on_the_device_until_the_host_finds_another_one() -> None:
    handle, _ = handle_of(Engine(), verification())
    assert handle.state is OverlapState.LAUNCHED
    assert handle.select([])
    for sequence in (1, 2):
        handle.discard(sequence)
        assert handle.state is OverlapState.DISCARDED
    assert handle.result(FEATURES, lambda: None), "trees grow again"


def test_a_result_of_another_epoch_is_ignored() -> None:
    engine = Engine()
    handle, _ = handle_of(engine, verification(EPOCH - 1))
    assert (handle.state, engine.asked) == (OverlapState.IDLE, [])
    assert handle.result((Features(EPOCH - 1, 1),), lambda: None) is None
    assert engine.asked == []


def test_a_handle_of_an_epoch_that_is_over_drafts_nothing() -> None:
    engine = Engine()
    handle, _ = handle_of(engine, current=False)
    assert handle.select([]) is None
    assert handle.result(FEATURES, lambda: None) is None
    assert engine.asked == []


@pytest.mark.parametrize("failing", ["start", "select", "observe", "begin", "finish"])
def test_an_error_of_the_drafter_is_kept_and_nothing_is_asked_after_it(failing: str) -> None:
    """Raised here, it would fail the worker; the features are sent as messages instead."""
    engine = Engine()
    engine.failing = failing
    handle, epoch = handle_of(engine, verification())
    handle.select([])
    assert handle.result(FEATURES, lambda: None) is None
    assert str(epoch.failure).startswith("d failed: ValueError")
    assert engine.asked[-1] == failing
