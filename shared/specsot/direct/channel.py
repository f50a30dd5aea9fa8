"""A channel between two members of one host, by torch.distributed: NCCL between GPUs, gloo between CPUs.

Refuses to know what it carries: bytes go in at one end and come out at the other, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal

import torch
from torch import Tensor

from specsot.direct.standing import use_device
from specsot.errors import Unavailable

End = Literal[0, 1]
Make = Callable[[Path, End, torch.device, timedelta], Any]

CPU = "cpu"
SENDER: End = 0
RECEIVER: End = 1
PATIENCE = 30.0  # seconds until an end that does not come counts as absent, and bytes that do not as lost


class Channel:
    """One end. It meets the other one when it is first used, as only then its device is known."""

    def __init__(self, place: Path, end: End, patience: float = PATIENCE, make: Make | None = None) -> None:
        """place: a file for both ends to meet in. make: what sends and receives."""
        self._place, self._patience = place, timedelta(seconds=patience)
        self._end: End = end
        self._make = make or group_on
        self._group: Any = None
        self._joining = Lock()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.lost = False

    async def deliver(self, data: Tensor) -> None:
        """Send, without waiting for anybody but at the first time. Raises Unavailable."""
        if self._group is None:
            await asyncio.to_thread(self._join, data.device)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        work = self._exchange("send", data, RECEIVER)
        self._sent.append((work, data))  # must stay in memory until it is read

    def receive(self, data: Tensor) -> None:
        """Fill it in: on a CPU now, on a GPU before what is launched there next. Raises Unavailable."""
        if self._group is None:
            self._join(data.device)
        work = self._exchange("recv", data, SENDER)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(error) from None

    def close(self) -> None:
        """At once; nothing waits for what is under way, on no device either."""
        self.lost = True
        group, self._group = self._group, None
        if group is not None:  # an interpreter that ended meanwhile would take the process down with it
            Thread(target=_abort, args=(group, [*self._sent]), daemon=False).start()
        self._sent.clear()

    def _join(self, device: torch.device) -> None:
        """Greet each other: NCCL connects with the first bytes alone, and whoever sends them waits for the
        other end. That must not be the event loop, which has yet to write the header that calls it.
        """
        use_device(str(device))
        word = torch.zeros(1, device=device)
        with self._joining:
            if self._group is not None or self.lost:
                return
            try:
                group = self._make(self._place, self._end, device, self._patience)
                greet = group.send if self._end == SENDER else group.recv
                greet([word], RECEIVER if self._end == SENDER else SENDER, 0).wait()
            except RuntimeError as error:
                raise self._gone(error) from None
            self._group = group
        if self.lost:  # meanwhile; nobody else will end it
            self.close()

    def _exchange(self, what: Literal["send", "recv"], data: Tensor, peer: End) -> Any:
        if self._group is None:
            raise Unavailable("the channel for rows is closed")
        try:
            return getattr(self._group, what)([data], peer, 0)
        except RuntimeError as error:
            raise self._gone(error) from None

    def _gone(self, error: RuntimeError) -> Unavailable:
        return Unavailable(f"the channel for rows broke: {str(error).splitlines()[0]}")


def group_on(place: Path, end: End, device: torch.device, patience: timedelta) -> Any:
    from torch import distributed

    store = distributed.FileStore(str(place), 2)  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(patience)
    _check_devices(store, end, device)
    if device.type == "cuda":
        # Rows go before what is computed next: the other end waits for them.
        settings: Any = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        settings._timeout = patience
        return distributed.ProcessGroupNCCL(store, end, 2, settings)
    gloo: Any = distributed.ProcessGroupGloo
    settings = gloo._Options()
    settings._timeout = patience
    settings._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, end, 2, settings)


def _check_devices(store: Any, end: End, device: torch.device) -> None:
    """Each end tells its own. Raises Unavailable where they cannot be joined: NCCL would not say why."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU
    store.set(f"device {end}", mine)
    theirs = store.get(f"device {1 - end}").decode()
    if mine == theirs != CPU:
        raise Unavailable("two stages share a GPU, where rows go by --transport grpc")
    if CPU in (mine, theirs) and mine != theirs:
        raise Unavailable("one stage is on a GPU and the next on a CPU, where rows go by --transport grpc")


def _abort(group: Any, held: list[Any]) -> None:
    """NCCL's kernels wait on the device until somebody says so; gloo's connections end with the last holder.

    held: what they read until then.
    """
    group.abort()
    held.clear()
