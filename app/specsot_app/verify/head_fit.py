"""Measures a head on its base's own text: what is accepted, and whether another setting explains more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specsot.members import (
    AS_PUBLISHED,
    KvDtype,
    Overrides,
    Quantization,
    Range,
    TreeShape,
    WeightFormat,
)
from specsot.model.config import read_config
from specsot.model.decoder import Decoder
from specsot_app.core.verify_report import Acceptance, HeadFit, choose_trial, think_of_trials
from specsot_app.verify.checks import begin, take_lap
from specsot_app.verify.laps import DrivenLaps
from specsot_app.verify.reference import feed_base, feed_head
from specsot_drafter.heads.eagle import EagleHead, FinalHidden
from specsot_drafter.heads.loading import load_head

SHAPE = TreeShape(fixed=True)

WrittenTexts = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # (prompt, what the base wrote behind it)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Where base and head lie, and how they are read. overrides: of the head's config.

    dtype, quantization, kv_dtype: of the base; draft_dtype (None: the same), draft_quantization: of the head.
    """

    model: Path
    draft_model: Path
    dtype: torch.dtype
    device: str
    model_format: WeightFormat = "safetensors"
    draft_format: WeightFormat = "safetensors"
    overrides: Overrides = AS_PUBLISHED
    quantization: Quantization | None = None
    kv_dtype: KvDtype = "auto"
    draft_dtype: torch.dtype | None = None
    draft_quantization: Quantization | None = None

    def base(self) -> Decoder:
        layers, pickled = Range(0, read_config(self.model).layers), self.model_format == "bin"
        held, kept = self.quantization, self.kv_dtype
        return Decoder.load(
            self.model, layers, self.dtype, self.device, pickled, quantization=held, kv_dtype=kept
        )

    def head(self, overrides: Overrides) -> EagleHead:
        return load_head(
            self.draft_model,
            self.model,
            self.draft_dtype or self.dtype,
            self.device,
            self.draft_format == "bin",
            self.model_format == "bin",
            overrides,
            self.draft_quantization,
        )


@torch.inference_mode()
def measure_fit(pair: ModelPair, spoken: WrittenTexts) -> HeadFit:
    """Draft behind every prompt as the base spoke; then see whether another setting explains it better."""
    base, head = pair.base(), pair.head(pair.overrides)
    lengths = [(prompt, len(written)) for prompt, written in spoken]
    as_is = draft(base, head, lengths)
    taps = None if isinstance(head.fusion, FinalHidden) else head.taps
    trials = think_of_trials(pair.overrides, taps, base.config.layers, base.config.rope.theta)
    told = {trial: explain(base, pair.head(trial), spoken) for trial in trials}
    chosen = choose_trial(explain(base, head, spoken), told)
    return (
        HeadFit(as_is) if chosen is None else HeadFit(as_is, chosen, draft(base, pair.head(chosen), lengths))
    )


@torch.inference_mode()
def draft(base: Decoder, head: EagleHead, wanted: Sequence[tuple[Sequence[int], int]]) -> Acceptance:
    """Drafts accepted in every lap of writing so many tokens behind each prompt, all side by side."""
    most = max(tokens for _, tokens in wanted)
    laps = DrivenLaps(base, head, SHAPE, [len(prompt) for prompt, _ in wanted], most + SHAPE.depth + 2)
    begin(laps, {i: prompt for i, (prompt, _) in enumerate(wanted)})
    left = {i: tokens for i, (_, tokens) in enumerate(wanted) if tokens}
    lengths: list[int] = []
    while left:
        paths = {i: verdict.nodes for i, (_, verdict) in take_lap(laps, left).items()}
        lengths += [len(nodes) - 1 for nodes in paths.values()]
        left = {i: count - len(paths[i]) for i, count in left.items()}
        left = {i: count for i, count in left.items() if count > 0}
    return Acceptance(tuple(lengths))


def explain(base: Decoder, head: EagleHead, spoken: WrittenTexts) -> list[float]:
    """Log-probability the head gives each token the base wrote, from the base's true states.

    Tokens that the head cannot draft are left out.
    """
    drafted = head.to_target(torch.arange(head.draft_vocab, device=head.device))
    own = torch.full((base.config.vocab,), -1, device=head.device)
    own[drafted] = torch.arange(head.draft_vocab, device=head.device)
    return [chance for prompt, written in spoken for chance in _explain(base, head, own, prompt, written)]


def _explain(
    base: Decoder, head: EagleHead, own: Tensor, prompt: Sequence[int], written: Sequence[int]
) -> list[float]:
    """Row j pairs the state of token j with token j + 1, and guesses token j + 2."""
    tokens = torch.tensor([*prompt, *written], device=head.device)
    rows, skipped = len(tokens) - 2, len(prompt) - 2
    if rows <= skipped or skipped < 0:
        return []
    _, fused = feed_base(base, tokens[:rows], head.tap_slices())
    outputs, _ = feed_head(head, tokens[1:-1], head.features(fused))
    wanted = own[tokens[len(prompt) :]]
    chances = head.log_probs(outputs[skipped:])[wanted >= 0]
    return chances.gather(1, wanted[wanted >= 0, None])[:, 0].tolist()
