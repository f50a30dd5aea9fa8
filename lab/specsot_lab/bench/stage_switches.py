"""Stages with one optimisation switched off, for rows of `specsot bench ablation` that no option can produce.

The product always moves accepted KV rows together, and always captures what its device can capture. Here both
can be switched off, in a loop of sequencer, stage, verifier and drafter in one thread.
"""

from __future__ import annotations

from typing import Final

from specsot.core.frames import Frame
from specsot.params import Message
from specsot_bench.core.eagle_inputs import EagleConfig
from specsot_bench.eagle.generation import Generation, GenerationLimits, StageMaker
from specsot_bench.eagle.models import TargetAndDraft
from specsot_bench.reference_model import load_decoder
from specsot_bench.runners import ModelSet
from specsot_drafter.heads.loading import load_head
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.core.kv_plan import KvPlan
from specsot_model.kv import Moves
from specsot_worker.stage import DecoderStage

# The trees that are drafted.
TREES: Final = EagleConfig(topk=4, num_steps=5, num_draft_tokens=24)


class RowByRowStage(DecoderStage):
    """Moves the KV rows of accepted nodes one by one, as a cache that is rebuilt token by token does.

    Moves are in ascending order and never point upwards, so none overwrites a row that a later one reads:
    accepted nodes [0, 2, 3] -> moves 2 to 1, then 3 to 2.
    """

    def _prepare_pages(self, frame: Frame, plan: KvPlan) -> Moves:
        """Move the KV rows of accepted nodes one by one, and return (): no moves are left.

        frame: The frame.
        plan: Its copies and moves of KV rows.

        Otherwise, the pages are prepared as `DecoderStage` does.
        """
        for move in super()._prepare_pages(frame, plan):
            self._kv.move((move,))
        return ()


class UncapturedStage(DecoderStage):
    """A stage that runs kernel by kernel even if the device could run a captured graph."""

    def capture(self) -> None:
        """Capture nothing."""


class SingleThread:
    """Writes greedy answers with EAGLE trees in one thread, with any kind of stage.

    models: Base model, head and precision. Without a head, nothing is drafted.
    """

    def __init__(self, models: ModelSet) -> None:
        """Load the base model, the head if there is one, and the tokenizer.

        models: Base model, head and precision. Without a head, nothing is drafted.

        Raises ModelError or HeadMismatch if a model cannot be loaded.
        """
        decoder = load_decoder(models)
        placement = models.base, decoder.dtype, decoder.device
        head = (
            load_head(models.head, *placement, quantization=models.drafter_quantization)
            if models.head
            else None
        )
        self._models = TargetAndDraft(decoder, head)
        self._text = Text(models.base)
        self._prompts = Prompts(models.base, self._text)

    def write(self, question: str, tokens: int, make_stage: StageMaker) -> tuple[str, int, float]:
        """Return an answer, its number of tokens, and the seconds that it took.

        question: What the user asks.
        tokens: Number of tokens that are written; ends of the answer are ignored.
        make_stage: Makes the stage.

        The answer is greedy, and its text is decoded from all tokens. The seconds are those of the whole
        generation, the prompt included.
        """
        prompt = self._prompts.chat((Message("user", question),))
        limits = GenerationLimits(tokens, seed=0)
        generation = Generation(self._models, TREES, [tuple(prompt)], limits, make_stage=make_stage)
        for _ in generation.pieces():
            pass
        (written,) = generation.tokens
        return self._text.decode(written), len(written), generation.stats.seconds
