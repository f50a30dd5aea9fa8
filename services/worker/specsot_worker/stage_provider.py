"""What a worker needs of a stage, and who makes stages and verifiers, epoch for epoch."""

from __future__ import annotations

from typing import Any, Protocol

from specsot.core.frames import Frame
from specsot.core.pages import PageTable
from specsot.members import Configuration, Range, Registration
from specsot_worker.verifier import Verifier


class StageRunner(Protocol):
    """One stage of one epoch, with its pages. Frames come strictly in order.

    uncaptured: frames that ran kernel by kernel though there are graphs.
    """

    @property
    def uncaptured(self) -> int: ...

    @property
    def table(self) -> PageTable: ...

    @property
    def layers(self) -> Range: ...

    def tap(self, layer: int, weight: Any) -> None:
        """Fuse the input of `layer` through `weight` [Hd, H] into every frame from now on."""
        ...

    def prompt_rows(self, rows: int) -> int:
        """Rows of a frame of prompts alone, where other frames have so many."""
        ...

    def capture(self) -> None:
        """Whatever makes later frames quicker; all taps are here."""
        ...

    def run(self, frame: Frame) -> Frame:
        """Apply the header, run the rows; returns the frame as the next stage must have it."""
        ...

    def hold(self) -> None:
        """Nothing is sent for now."""
        ...


class StageProvider(Protocol):
    """Stages of any epoch, and the end of the ring."""

    @property
    def name(self) -> str: ...

    @property
    def loaded(self) -> int:
        """Layers of the range that was asked for last which are here. Asked from another thread."""
        ...

    @property
    def fetched(self) -> int:
        """Bytes of the model's files that are here, of one that is fetched; 0 of others. Like `loaded`."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the base has; None: they are not checked."""
        ...

    def registration(self) -> Registration: ...

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner: ...

    def fetch(self, layers: Range) -> None:
        """Have the bytes of these layers on this machine. May be called from any thread."""
        ...

    def preload(self, layers: Range | None = None) -> bool:
        """Load a little of these layers, or of what any later epoch may ask for; whether there is more, and
        room for it. Raises ModelError: no room for these.
        """
        ...

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier: ...
