"""Measures how long a stage computes a frame, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections import deque

import torch


class HostTimer:
    """Timer on the host's clock: measures from the frame's turn to the end of the host's work. Its methods
    are called in this order for every frame.
    """

    _start_seconds = 0.0

    def begin(self) -> None:
        """Start measuring: it is the frame's turn."""
        self._start_seconds = time.perf_counter()

    def mark_input(self) -> None:
        """Record that the frame's hidden states are present, or will be before the device continues."""

    def end(self, rows: int) -> float:
        """Record that everything has been launched. Return the seconds that this stage took for the frame.

        rows: Number of tokens of the frame.
        """
        return time.perf_counter() - self._start_seconds


class DeviceTimer(HostTimer):
    """Timer of a stage on a GPU that passes hidden states on while they are still being computed.

    It returns the device time of the newest finished frame with about as many tokens (the same bit length).
    Until there is such a frame, it returns the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure the current CUDA stream of a device.

        device: The device of the stage.
        """
        self._stream = torch.cuda.current_stream(device)
        self._input_event = self._mark()
        # Frames in order: bit length of their tokens, and the events before and after their computation.
        self._running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        # Device seconds of the newest finished frame, by bit length of its tokens.
        self._measured: dict[int, float] = {}

    def mark_input(self) -> None:
        """Record the event from which the device's time is measured."""
        self._input_event = self._mark()

    def end(self, rows: int) -> float:
        """Return the device seconds of an earlier frame of about this size, or, until there is one, the
        host's seconds; see the class docstring. For a frame without tokens, return the host's seconds.

        rows: Number of tokens of the frame.

        The events of this frame are read by a later call.
        """
        if not rows:
            return super().end(rows)
        self._poll()
        self._running.append((rows.bit_length(), self._input_event, self._mark()))
        return self._measured.get(rows.bit_length()) or super().end(rows)

    def _poll(self) -> None:
        """Read the times of the frames that are finished by now. Nothing happens if none is finished."""
        while self._running and self._running[0][2].query():
            size, start, end = self._running.popleft()
            self._measured[size] = start.elapsed_time(end) / 1e3

    def _mark(self) -> torch.cuda.Event:
        """Record an event on the stream, and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class LastStageTimer(HostTimer):
    """Timer of a last stage on a GPU that is not also the first.

    The host waits for this stage's results anyway, so the host's clock suffices. Time starts when the hidden
    states have arrived, because before that the preceding stages were computing.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure the current CUDA stream of a device.

        device: The device of the stage.
        """
        self._stream = torch.cuda.current_stream(device)
        self._input_event = torch.cuda.Event()

    def mark_input(self) -> None:
        """Record an event that completes when the hidden states have arrived."""
        self._input_event.record(self._stream)

    def end(self, rows: int) -> float:
        """Wait until the hidden states have arrived, and return 0: the verifier counts what the device takes
        from then on.

        rows: Number of tokens of the frame, which does not matter here.
        """
        self._input_event.synchronize()
        return 0.0


def make_timer(device: torch.device, first: bool, last: bool) -> HostTimer:
    """Return the timer of a stage: on a CPU, and for a stage that runs the whole model, the host's clock; on
    a GPU, a timer for the last stage or for the others.

    device: The device of the stage.
    first: True if the stage runs the model's first layer.
    last: True if the stage runs the model's last layer.

    The three results are `HostTimer`, `LastStageTimer` and `DeviceTimer`.
    """
    if device.type != "cuda" or (first and last):
        return HostTimer()
    return LastStageTimer(device) if last else DeviceTimer(device)
