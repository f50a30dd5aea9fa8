"""What a worker needs of a stage, and of the provider that makes the stages and verifiers of all epochs."""

from __future__ import annotations

from typing import Any, Protocol

from specsot.core.frames import Frame
from specsot.core.pages import PageTable
from specsot.members import Configuration, Range, Registration
from specsot_worker.verifier import Verifier


class StageRunner(Protocol):
    """One stage of one epoch, with its KV pages. Frames must be run strictly in order. `DecoderStage`
    implements it.

    uncaptured: Number of frames that ran kernel by kernel although CUDA graphs were captured.
    """

    @property
    def uncaptured(self) -> int:
        """Number of frames that ran kernel by kernel although CUDA graphs were captured."""
        ...

    @property
    def table(self) -> PageTable:
        """The stage's page table, on which it applies the operations of every frame."""
        ...

    @property
    def layers(self) -> Range:
        """The stage's layer range."""
        ...

    def tap(self, layer: int, weight: Any) -> None:
        """From now on, fuse the input of a layer into the features of every frame.

        layer: Number of the layer in the model, within this stage's range.
        weight: Slice of the draft head's weights for this layer, [feature_size, hidden_size].
        """
        ...

    def prompt_rows(self, rows: int) -> int:
        """Return the maximum number of tokens of a frame that carries prompts only. It is `rows` for a stage
        that can run no more, and never less.

        rows: Maximum number of tokens of other frames.
        """
        ...

    def capture(self) -> None:
        """Prepare whatever makes later frames faster, such as CUDA graphs. Called once all taps have arrived.
        A stage that cannot prepare anything does nothing.
        """
        ...

    def run(self, frame: Frame) -> Frame:
        """Apply the frame's header to the KV pages and run its tokens. Return the frame for the next stage,
        with hidden states; they are None for a frame without tokens.

        frame: The next frame in order.
        """
        ...

    def pause_compute_timer(self) -> None:
        """Stop counting compute time: the launched step waits for its frame. Nothing happens if no step has
        been launched.
        """
        ...


class StageProvider(Protocol):
    """Maker of the stage and, on the last stage, of the verifier of every epoch. `StageLoader` implements
    it.
    """

    @property
    def name(self) -> str:
        """Name of the worker."""
        ...

    @property
    def loaded(self) -> int:
        """Number of layers that are loaded of the range requested last. Read from another thread."""
        ...

    @property
    def fetched(self) -> int:
        """Number of bytes of the model's files that have been fetched. 0 for a model whose files are not
        fetched. Read from another thread.
        """
        ...

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids of the base model. None: token ids are not checked."""
        ...

    def registration(self) -> Registration:
        """Measure the layers, and return what the master is to know of this worker. Raises ModelError if
        there is no room for a fixed layer range.
        """
        ...

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner:
        """Return the stage of an epoch, with empty pages.

        configuration: The epoch as the master has configured it.
        layers: The layer range to run. Missing layers are loaded.

        Raises ModelError if there is no room for it.
        """
        ...

    def fetch(self, layers: Range) -> None:
        """Make the files of a layer range available on this machine. Nothing happens if they are. May be
        called from any thread.

        layers: The layer range.
        """
        ...

    def preload(self, layers: Range | None = None) -> bool:
        """Load one more part of some layers. Return whether to call again: True if a part was loaded, False
        if all is loaded, or if there is no room.

        layers: The layer range to load. None: what a later epoch may need.

        Raises ModelError if there is no room for `layers`.
        """
        ...

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        """Return the verifier of an epoch, without sequences.

        stage: The last stage of the epoch.
        configuration: The epoch as the master has configured it.
        """
        ...
