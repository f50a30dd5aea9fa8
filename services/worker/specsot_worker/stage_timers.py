"""How long a stage takes for a frame, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections import deque

import torch


class HostTimer:
    """From the frame's turn to the end of what the host does for it. Asked in this order for every frame."""

    _begun = 0.0

    def begin(self) -> None:
        """Its turn has come."""
        self._begun = time.perf_counter()

    def mark_input(self) -> None:
        """Its rows are here, or the device will have them before it goes on."""

    def end(self, rows: int) -> float:
        """Everything is launched. Returns the stage's seconds."""
        return time.perf_counter() - self._begun


class DeviceTimer(HostTimer):
    """A stage on a GPU that hands its rows on while they are computed: what the device took for the last
    frame of about as many rows that is over. Until there is one, what the host took.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._input_event = self._mark()
        self._running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._measured: dict[int, float] = {}

    def mark_input(self) -> None:
        self._input_event = self._mark()

    def end(self, rows: int) -> float:
        if not rows:
            return super().end(rows)
        self._poll()
        self._running.append((rows.bit_length(), self._input_event, self._mark()))
        return self._measured.get(rows.bit_length()) or super().end(rows)

    def _poll(self) -> None:
        """What is over by now."""
        while self._running and self._running[0][2].query():
            size, here, over = self._running.popleft()
            self._measured[size] = here.elapsed_time(over) / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class LastStageTimer(HostTimer):
    """The last stage behind others, on a GPU: it waits for its result anyway, so the host's clock will do.
    But it starts when the rows have come: before that, others were at work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._input_event = torch.cuda.Event()

    def mark_input(self) -> None:
        self._input_event.record(self._stream)

    def end(self, rows: int) -> float:
        """Waits, now that all is launched. What the device takes from then on is counted by the judge."""
        self._input_event.synchronize()
        return 0.0


def make_timer(device: torch.device, first: bool, last: bool) -> HostTimer:
    """For a stage that runs the first layer, the last one, both or none."""
    if device.type != "cuda" or (first and last):
        return HostTimer()
    return LastStageTimer(device) if last else DeviceTimer(device)
