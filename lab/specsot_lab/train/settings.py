"""The options of a training run, as frozen values that refuse what cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specsot.errors import InvalidRequest
from specsot.service.option_table import LAYER_NUMBERS, Option, option
from specsot.service.options import Dtype


@dataclass(frozen=True, slots=True)
class Learning:
    """How a head learns. Two runs with the same Learning and the same rows give the same head.

    HEADING: Heading above these options in the help.
    steps: Number of optimiser steps. 0: the head to start from is only measured.
    batch_tokens: Maximum number of positions of a step, padding included.
    rate: AdamW's learning rate at its peak. It rises linearly, and then falls as a cosine to a tenth.
    warmup: Number of steps in which the learning rate rises.
    depth: Number of tokens that the head learns to draft in a row: steps of the training-time test, or
        drafted tokens of a block.
    decay: The prediction at depth k, counted from 0, has the weight decay**k.
    clip: Norm to which the gradient of a step is limited.
    length: Maximum number of positions of a row; longer rows are truncated.
    held_out: Fraction of the questions or conversations that are measured and never trained on.
    every: Number of steps between two measurements, each of which is followed by a checkpoint.
    seed: Seed of the first weights, of the held-out questions, and of the order of the rows.
    """

    HEADING: ClassVar[str] = "Learning"

    steps: int = option(2000, "Optimiser steps; 0 measures the head to start from.")
    batch_tokens: int = option(16384, "Positions of each step.")
    rate: float = option(1e-3, "Peak learning rate of AdamW.", flag="learning-rate")
    warmup: int = 50
    depth: int = option(7, "Steps of the training-time test, or drafts of a block.")
    decay: float = 0.8
    clip: float = 0.5
    length: int = option(1024, "Maximum positions of a row; longer ones are truncated.")
    held_out: float = option(0.03, "Share of the questions held out for measurements.")
    every: int = option(200, "Steps between measurements and checkpoints.")
    seed: int = option(0, "Seed of the first weights and of the order.")

    def __post_init__(self) -> None:
        """Check every value.

        Raises InvalidRequest that names the first value that cannot be used.

        batch_tokens, depth, length and every must be at least 1, steps at least 0, rate above 0, length above
        2, held_out between 0 and 1 (both excluded), and batch_tokens at least length. The other fields are
        not checked.
        """
        for name in ("batch_tokens", "depth", "length", "every"):
            _require(getattr(self, name) >= 1, name, "must be >= 1")
        _require(self.steps >= 0, "steps", "must be >= 0")
        _require(self.rate > 0, "learning_rate", "must be > 0")
        _require(self.length > 2, "length", "must be > 2")
        _require(0 < self.held_out < 1, "held_out", "must be in (0, 1)")
        _require(self.batch_tokens >= self.length, "batch_tokens", "must be >= length")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step.

        step: Number of the step, from 0.

        The rate rises linearly to `rate` in the first `warmup` steps, then falls as a cosine, and is a tenth
        of `rate` from the last step on.
        """
        from math import cos, pi

        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.rate * (0.1 + 0.45 * (1 + cos(pi * min(done, 1.0))))


# Token ids. Size of a new head's draft vocabulary, or all ids of a base model that has fewer. Untuned.
VOCABULARY = 32000


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The format of a head, as the user asks for it. None stands for the value of the head to start from, or
    else of the base model.

    HEADING: Heading above these options in the help.
    kind: Kind of the head: "eagle3", one that drafts in one pass ("dflash", "dspark" or "p-eagle"), or "mtp"
        for an MTP layer.
    layers: Number of layers of a DFlash, DSpark or P-EAGLE head. None: the default of a new head.
    causal_head: True if the rows of a DFlash or DSpark block see only the earlier rows of the block.
    vocabulary: Number of token ids that the head drafts: those that are most frequent in what it learns from.
        None: VOCABULARY, or the vocabulary of the head to start from. An MTP layer drafts all ids and learns
        so many of them; None: all.
    intermediate: Width of the head's MLP. None: that of the head to start from, or of the base model.
    width: Width of an EAGLE-3 head. None: that of the head to start from, or of the base model.
    shared_lm_head: True if the head drafts with the base model's lm_head, so that its file has none.
    taps: Layers of the base model whose inputs the head reads, ascending. None: those of the head to start
        from, or the usual ones.
    """

    HEADING: ClassVar[str] = "Head"

    kind: Literal["eagle3", "dflash", "dspark", "p-eagle", "mtp"] = option(
        "eagle3",
        "What the head is: EAGLE-3, one that drafts in one pass (DFlash, DSpark, P-EAGLE), or an MTP layer.",
    )
    layers: int | None = option(
        None, "`dflash`, `dspark`, `p-eagle`: layers of the head.", flag="head-layers", unset="3"
    )
    causal_head: bool = option(
        False, "`dflash`, `dspark`: rows of a block see only those before them (JetSpec)."
    )
    vocabulary: int | None = option(
        None,
        "Number of token ids that the head drafts, the most frequent ones.",
        flag="draft-vocab",
        unset="32000, or as the head to start from",
    )
    intermediate: int | None = option(None, "Width of the head's MLP.", unset="the base's")
    width: int | None = option(
        None,
        "Hidden size of an EAGLE-3 head; a narrower one reads the base's embeddings through a projection.",
        flag="head-width",
        unset="the base's",
    )
    shared_lm_head: bool = option(
        False, "An EAGLE-3 head drafts by the base's lm_head, so that its file holds none."
    )
    taps: tuple[int, ...] | None = option(
        None,
        "Layers of the base whose input the head reads, such as 2,16,29.",
        flag="aux-layers",
        kind=LAYER_NUMBERS,
        unset="the reference's three",
    )

    def __post_init__(self) -> None:
        """Check every value.

        Raises InvalidRequest that names the first value that cannot be used.

        vocabulary, intermediate and layers must be None or at least 1; the errors call them by their flags
        draft-vocab, intermediate and head-layers. The other fields are checked with the base model.
        """
        counts = {
            "draft_vocab": self.vocabulary,
            "intermediate": self.intermediate,
            "head_layers": self.layers,
        }
        for name, value in counts.items():
            _require(value is None or value >= 1, name, "must be >= 1")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the base model is asked, so that a head learns from the base model's own answers.

    HEADING: Heading above these options in the help.
    direct: Fraction of the questions that are answered without a plan, too.
    plan_tokens: Maximum number of tokens of a plan.
    answer_tokens: Maximum number of tokens of a branch or a direct answer.
    together: Number of sequences that are written at a time.
    """

    HEADING: ClassVar[str] = "Answers of the base"

    direct: float = option(0.25, "Share of the questions that are answered without a plan, too.")
    plan_tokens: int = 256
    answer_tokens: int = option(256, "Maximum number of tokens of a branch or a direct answer.")
    together: int = option(64, "Answers written side by side.")

    def __post_init__(self) -> None:
        """Check every value.

        Raises InvalidRequest that names the first value that cannot be used.

        direct must be in 0 .. 1, and plan_tokens, answer_tokens and together at least 1.
        """
        _require(0 <= self.direct <= 1, "direct", "must be in [0, 1]")
        for name in ("plan_tokens", "answer_tokens", "together"):
            _require(getattr(self, name) >= 1, name, "must be >= 1")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """All options of `specsot train`.

    HEADING: Heading above these options in the help.
    model: Directory or GGUF file of the base model.
    output: Directory of the head. The state of the run is in a folder of it.
    questions: Files and folders of questions that the base model answers.
    phrasings: Templates in which "{}" stands for a line of text; each line becomes one question for each
        template.
    data: Files and folders of conversations, texts or rows that exist already.
    start: Directory of a head to continue from. None: a new head.
    plan: Format of the head.
    learning: How the head learns.
    asking: How the base model answers the questions.
    dtype: Data type of the base model. In bf16 the head multiplies in bf16, too.
    device: Torch device.
    """

    HEADING: ClassVar[str] = "Run"

    model: Annotated[Path, Option("Directory or GGUF file of the base model.", metavar="PATH")]
    output: Annotated[
        Path,
        Option("Directory for the head and the run's state, from which a run is continued.", metavar="DIR"),
    ]
    questions: tuple[Path, ...] = option(
        (), "File or folder of questions, one a line or JSON lines; the base answers them."
    )
    phrasings: tuple[str, ...] = option(
        ("{}",),
        "Template that makes a question of a line of text, such as 'Explain {}.'.",
        flag="phrasing",
        unset="the line itself",
    )
    data: tuple[Path, ...] = option((), "File or folder of conversations (JSON lines) or of plain text.")
    start: Path | None = option(None, "Head to continue from, or to widen.", unset="a new head")
    plan: HeadPlan = field(default_factory=HeadPlan)
    learning: Learning = field(default_factory=Learning)
    asking: AnswerOptions = field(default_factory=AnswerOptions)
    dtype: Dtype = option("auto", "Data type of the base; bf16 trains in mixed precision.")
    device: str = option("cpu", "Torch device, such as cpu or cuda:0.")

    @property
    def training(self) -> Path:
        """Return the folder of the run's state: its rows, checkpoint and log."""
        return self.output / "training"


def _require(is_valid: bool, name: str, rule: str) -> None:
    """Raise InvalidRequest if the value of an option is not valid; else return.

    is_valid: True if the value is valid.
    name: Name of the field.
    rule: What a valid value is, such as "must be >= 1", for the error.
    """
    if not is_valid:
        raise InvalidRequest(f"{name.replace('_', '-')} {rule}", field=name)
