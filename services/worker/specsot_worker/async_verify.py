"""Verification on a thread of its own, for GPUs: the next frame is launched meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from specsot.core.frames import Frame
from specsot.service.compute import Compute
from specsot_worker.frame_work import run_stage
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import VerifiedFrame

OnLaunched = Callable[["LaunchedFrame"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LaunchedFrame:
    """A frame behind the last layer. computed: a GPU's event; its rows are there once it is recorded."""

    frame: Frame
    passed: Frame
    computed: Any


def launch_frame(stage: StageRunner, frame: Frame) -> LaunchedFrame:
    passed = run_stage(stage, frame)
    computed = None
    if passed.hidden is not None and passed.hidden.is_cuda:
        computed = torch.cuda.current_stream(passed.hidden.device).record_event()
    return LaunchedFrame(frame, passed, computed)


class AsyncVerifier:
    """Verifies one epoch's frames in their order, one at a time, each as soon as its rows are there."""

    def __init__(self, name: str, executor: Executor, on_launched: OnLaunched) -> None:
        """executor: of one thread. on_launched: what to do with each frame."""
        self._compute = Compute(name, executor)
        self._on_launched = on_launched
        self._stream: torch.cuda.Stream | None = None
        self._queue = asyncio.Queue[LaunchedFrame]()
        self._unverified = 0
        self._task = asyncio.create_task(self._verify_in_order())

    def busy(self) -> bool:
        """Frames are verified, or wait to be. Raises what went wrong with one."""
        if self._task.done():
            self._task.result()
        return self._unverified > 0

    def submit(self, launched: LaunchedFrame) -> None:
        self._unverified += 1
        self._queue.put_nowait(launched)

    async def run(
        self,
        verify: Callable[..., VerifiedFrame],
        launched: LaunchedFrame | None = None,
        within: float | None = None,
    ) -> VerifiedFrame:
        """See `Compute.run`."""
        return await self._compute.run(self._verify, verify, launched, within=within)

    def close(self) -> None:
        """Stop; what goes wrong from now on concerns nobody."""
        if not self._task.cancel() and not self._task.cancelled():
            self._task.exception()

    async def _verify_in_order(self) -> None:
        while True:
            await self._on_launched(await self._queue.get())
            self._unverified -= 1

    def _verify(self, verify: Callable[..., VerifiedFrame], launched: LaunchedFrame | None) -> VerifiedFrame:
        """All that judges do on a device has a stream of its own: else it would wait for frames behind this
        one. Nobody else may use what is made there, so features leave as copies.
        """
        with self._side_stream(launched):
            verified = verify(launched.passed) if launched else verify()
            features = {
                drafter: tuple(one if one.rows is None else replace(one, rows=one.rows.cpu()) for one in told)
                for drafter, told in verified.features.items()
            }
            if self._stream:
                self._stream.synchronize()  # until then it reads what belongs to other streams
            return replace(verified, features=features)

    def _side_stream(self, launched: LaunchedFrame | None) -> AbstractContextManager[object]:
        if launched and launched.computed:
            assert launched.passed.hidden is not None
            self._stream = self._stream or torch.cuda.Stream(launched.passed.hidden.device, priority=-1)
            self._stream.wait_event(launched.computed)
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()
