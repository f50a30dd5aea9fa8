"""The last stage's verdicts on a GPU, in a thread of their own: the next frame is launched meanwhile.

Refuses to know links, and what a verdict says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from specsot.compute import Compute
from specsot.frames import Frame
from specsot_worker.provider import LayerRange
from specsot_worker.verdict import Verdict

Read = Callable[["Launched"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Launched:
    """A frame behind the last layer. over: a GPU's event, until which not all of its rows are there."""

    frame: Frame
    passed: Frame
    over: Any


def launch(stage: LayerRange, frame: Frame) -> Launched:
    passed = stage.run(frame)
    over = None
    if passed.hidden is not None and passed.hidden.is_cuda:
        over = torch.cuda.current_stream(passed.hidden.device).record_event()
    return Launched(frame, passed, over)


class Reading:
    """One epoch's frames are read in their order, one at a time, each as soon as it can be."""

    def __init__(self, name: str, executor: Executor, read: Read) -> None:
        """executor: of one thread. read: what to do with each frame."""
        self._compute, self._read = Compute(name, executor), read
        self._stream: torch.cuda.Stream | None = None
        self._waiting = asyncio.Queue[Launched]()
        self._unread = 0
        self._going_on = asyncio.create_task(self._go_on())

    def busy(self) -> bool:
        """Frames are read, or wait to be. Raises what went wrong with one."""
        if self._going_on.done():
            self._going_on.result()
        return self._unread > 0

    def add(self, launched: Launched) -> None:
        self._unread += 1
        self._waiting.put_nowait(launched)

    async def run(
        self, judge: Callable[..., Verdict], launched: Launched | None = None, within: float | None = None
    ) -> Verdict:
        """See `Compute.run`."""
        return await self._compute.run(self._judge, judge, launched, within=within)

    def close(self) -> None:
        """Nothing more is read; whom that would have told what went wrong is not there any more."""
        if not self._going_on.cancel() and not self._going_on.cancelled():
            self._going_on.exception()

    async def _go_on(self) -> None:
        while True:
            await self._read(await self._waiting.get())
            self._unread -= 1

    def _judge(self, judge: Callable[..., Verdict], launched: Launched | None) -> Verdict:
        """All that judges do on a device has a stream of its own: else it would wait for frames behind this
        one. Nobody else may use what is made there, so features leave as copies.
        """
        with self._beside(launched):
            verdict = judge(launched.passed) if launched else judge()
            features = tuple(
                one if one.rows is None else replace(one, rows=one.rows.cpu()) for one in verdict.features
            )
            if self._stream:
                self._stream.synchronize()  # until then it reads what belongs to other streams
            return replace(verdict, features=features)

    def _beside(self, launched: Launched | None) -> AbstractContextManager[object]:
        if launched and launched.over:
            assert launched.passed.hidden is not None
            self._stream = self._stream or torch.cuda.Stream(launched.passed.hidden.device, priority=-1)
            self._stream.wait_event(launched.over)
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()
