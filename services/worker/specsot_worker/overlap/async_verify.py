"""Verification on a thread of its own, for GPUs: the next frame is launched meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from specsot.core.frames import Frame
from specsot.service.compute import Compute

OnLaunched = Callable[["LaunchedFrame"], Awaitable[None]]


class HasHostCopy(Protocol):
    """A result of a verification whose tensors can be copied to the host. `VerifiedFrame` implements it."""

    def on_host(self: Verified) -> Verified:
        """Return the same value, with every tensor in the host's memory."""
        ...


Verified = TypeVar("Verified", bound=HasHostCopy)


@dataclass(frozen=True, slots=True)
class LaunchedFrame:
    """A frame whose last layer has been launched.

    frame: The frame as it arrived.
    passed: The same frame with the hidden states of the last layer, which the device may still be computing.
    computed: CUDA event that completes when the hidden states are computed. None on a CPU, and for a frame
        without tokens.
    """

    frame: Frame
    passed: Frame
    computed: Any


def launch_frame(run: Callable[[Frame], Frame], frame: Frame) -> LaunchedFrame:
    """Run a frame through a stage without waiting for the device, and return the frame with an event that
    completes when its hidden states are computed. There is no event on a CPU, or for a frame without tokens.

    run: Runs the frame. Returns it with the stage's hidden states.
    frame: The frame as it arrived.
    """
    passed = run(frame)
    computed = None
    if passed.hidden is not None and passed.hidden.is_cuda:
        computed = torch.cuda.current_stream(passed.hidden.device).record_event()
    return LaunchedFrame(frame, passed, computed)


class AsyncVerifier(Generic[Verified]):
    """Verifier of the frames of one epoch on another thread: in order, one frame at a time, each as soon as
    its hidden states are computed.
    """

    def __init__(self, name: str, executor: Executor, on_launched: OnLaunched) -> None:
        """Start the task that verifies.

        name: Name of the worker, for errors.
        executor: Executor of one thread.
        on_launched: Verifies and announces one frame; awaited for each frame in order.

        Must be called on the event loop, where the task runs.
        """
        self._compute = Compute(name, executor)
        self._on_launched = on_launched
        self._stream: torch.cuda.Stream | None = None
        self._queue = asyncio.Queue[LaunchedFrame]()
        self._unverified = 0
        self._task = asyncio.create_task(self._verify_in_order())

    def busy(self) -> bool:
        """Return whether a frame is being verified or waits for that: False if all submitted frames are
        verified. Raises the error with which a verification has failed.
        """
        if self._task.done():
            self._task.result()
        return self._unverified > 0

    def submit(self, launched: LaunchedFrame) -> None:
        """Queue a frame for verification.

        launched: The frame, whose layers have been launched on the device.
        """
        self._unverified += 1
        self._queue.put_nowait(launched)

    async def run(
        self,
        verify: Callable[..., Verified],
        launched: LaunchedFrame | None = None,
        time_limit: float | None = None,
    ) -> Verified:
        """Run `verify` on the verification thread, and return what it returns, with tensors on the host.
        Raises Hung if the time limit is exceeded, see `Compute.run`.

        verify: Verifies one frame, or, without a frame, what was held back.
        launched: The frame whose `passed` is given to `verify`. None: `verify` is called without arguments.
        time_limit: Seconds that it may take. None: no limit.

        It may be called for held-back segments while no frame is being verified.
        """
        return await self._compute.run(self._verify, verify, launched, timeout_seconds=time_limit)

    def close(self) -> None:
        """Stop verifying. Queued frames are dropped, and later errors are ignored. A second call does
        nothing.
        """
        if not self._task.cancel() and not self._task.cancelled():
            self._task.exception()

    async def _verify_in_order(self) -> None:
        """Verify queued frames, one at a time, until the task is cancelled or a verification fails.

        An error of `on_launched` ends the task; `busy` raises it.
        """
        while True:
            await self._on_launched(await self._queue.get())
            self._unverified -= 1

    def _verify(self, verify: Callable[..., Verified], launched: LaunchedFrame | None) -> Verified:
        """Verify on a CUDA stream of its own, and return the result with tensors on the host. On the stage's
        stream, verification would wait for the frames launched after this one.

        verify: Verifies one frame, or, without a frame, what was held back.
        launched: The frame to verify. None: `verify` is called without arguments.

        Tensors made on that stream must not be used on other streams, so features leave as copies on the
        host.

        A CUDA stream is used once a frame with an event has been verified; before that, and on a CPU, work
        runs on the current stream.
        """
        with self._side_stream(launched):
            verified = (verify(launched.passed) if launched else verify()).on_host()
            if self._stream:
                # Until the stream is done, it reads tensors that belong to other streams.
                self._stream.synchronize()
            return verified

    def _side_stream(self, launched: LaunchedFrame | None) -> AbstractContextManager[object]:
        """Return a context in which tensor work runs on the verifier's stream, after the frame's hidden
        states are computed. Without CUDA the context does nothing.

        launched: The frame to verify. None: nothing is waited for.

        The stream is created for the first frame with an event, and used for every later call.
        """
        if launched and launched.computed:
            assert launched.passed.hidden is not None
            self._stream = self._stream or torch.cuda.Stream(launched.passed.hidden.device, priority=-1)
            self._stream.wait_event(launched.computed)
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()
