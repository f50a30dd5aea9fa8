"""Faults on demand: a worker that hangs or dies instead of computing its n-th frame. For tests of a fleet."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specsot.core.frames import Frame
from specsot.core.pages import PageTable
from specsot.members import Configuration, Range, Registration

if TYPE_CHECKING:  # a worker's flags are read before torch is imported
    from specsot_worker.stage import StageProvider, StageRunner
    from specsot_worker.verifier import Verifier


def hang() -> None:
    threading.Event().wait()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Callable[[], None]] = {"hang": hang, "die": die}


@dataclass(frozen=True, slots=True)
class Failpoint:
    """act: what happens at frame number `frame` of the process. whom: the one worker it is for; None: all."""

    act: Callable[[], None]
    frame: int
    whom: str | None = None

    def before(self, provider: StageProvider) -> StageProvider:
        return FailingProvider(provider, self) if self.whom in (None, provider.name) else provider


def failpoint(text: str) -> Failpoint:
    """ "hang@20", or "worker-1:die@20" where only one worker of that name shall. Raises ValueError."""
    found = re.fullmatch(r"(?:(.+):)?(\w+)@(\d+)", text)
    if found is None or found[2] not in KINDS:
        kinds = " or ".join(f"{kind}@FRAME" for kind in KINDS)
        raise ValueError(f"{text!r} is not [NAME:]{kinds}")
    return Failpoint(KINDS[found[2]], int(found[3]), found[1])


class FailingProvider:
    """A provider of layer ranges, one of which fails."""

    def __init__(self, provider: StageProvider, failpoint: Failpoint) -> None:
        self._provider, self._failpoint, self._frames = provider, failpoint, 0
        self.name, self.vocabulary = provider.name, provider.vocabulary

    @property
    def loaded(self) -> int:
        return self._provider.loaded

    def registration(self) -> Registration:
        return self._provider.registration()

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        return _FailingStage(self._provider.make_stage(configuration, layers), self._count)

    def preload(self) -> bool:
        return self._provider.preload()

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        return self._provider.make_verifier(stage, configuration)

    def _count(self) -> None:
        self._frames += 1
        if self._frames == self._failpoint.frame:
            self._failpoint.act()


class _FailingStage:
    """See `StageRunner`. before: is called first, with every frame."""

    def __init__(self, stage: StageRunner, before: Callable[[], None]) -> None:
        self._stage, self._before = stage, before

    @property
    def table(self) -> PageTable:
        return self._stage.table

    @property
    def layers(self) -> Range:
        return self._stage.layers

    def tap(self, layer: int, weight: Any) -> None:
        self._stage.tap(layer, weight)

    def capture(self) -> None:
        self._stage.capture()

    def run(self, frame: Frame) -> Frame:
        self._before()
        return self._stage.run(frame)
