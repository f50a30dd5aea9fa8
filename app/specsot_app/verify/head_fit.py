"""Measures a head on its base's own text: what is accepted, and whether another setting explains more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specsot.core.frames import Open, Opening
from specsot.members import Overrides, TreeShape
from specsot.model.config import ModelConfig
from specsot.model.decoder import Decoder
from specsot.model.fused import can_capture
from specsot.service.options import DraftModelOptions
from specsot_app.core.verify_report import Acceptance, HeadFit, choose_trial, think_of_trials
from specsot_app.eagle.generation import open_loop
from specsot_app.eagle.models import TargetAndDraft
from specsot_app.reference_model import load_whole
from specsot_app.verify.reference import feed_base, feed_head
from specsot_drafter.block_graphs import can_capture_block
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.heads.eagle import Eagle3Head, EagleHead, FinalHidden
from specsot_drafter.heads.fused import can_fuse
from specsot_drafter.loader import EagleBackend

SHAPE = TreeShape(fixed=True)
NAMES = {"eagle1": "EAGLE-1 or EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash"}

WrittenTexts = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # (prompt, what the base wrote behind it)


def describe_base(config: ModelConfig) -> str:
    """What runs of a base, and how."""
    stored = f", {config.published} weights" if config.published else ""
    graphs = "with" if can_capture(config, kernels=True, rounded=False) else "without"
    reach = f"{config.layers} layers, any ranges of them, {config.max_positions} positions"
    name = f"{config.text_of} (text only)" if config.text_of else config.model_type
    return f"{name}: {reach}{stored}; on GPUs {graphs} CUDA graphs"


def describe(head: EagleHead) -> tuple[str, ...]:
    """The head's family, how it drafts and from what, and what of this package works with it."""
    name, drafts, window = NAMES[head.kind], "a pass for every level of a tree", head.decoder.window
    if isinstance(head, BlockHead):
        drafts = f"one pass for {head.block.drafts} tokens"
    elif isinstance(head, Eagle3Head) and head.mask:
        name, learned = "P-EAGLE", head.mask.depth
        drafts = f"one pass for {learned} tokens" if learned else "one pass for all levels of a tree"
    sight = f", {len(window.layers)} of which see {window.rows} positions" if window else ""
    graphs = "with" if can_fuse(head) or can_capture_block(head) else "without"
    return (
        name,
        f"{drafts}, from what enters layers {', '.join(map(str, head.taps))} of the base",
        f"layers: {head.layers}{sight}; ids: {head.draft_vocab}; positions: {head.positions}",
        "chains and trees, branches, sampling, grammars, layer ranges, --draft-quantization;"
        f" on GPUs {graphs} CUDA graphs",
    )


def load_trial(options: DraftModelOptions, overrides: Overrides) -> EagleHead:
    """The head, its config overridden."""
    head = EagleBackend(replace(options, overrides=overrides)).load()
    assert isinstance(head, EagleHead)
    return head


@torch.inference_mode()
def measure_fit(options: DraftModelOptions, spoken: WrittenTexts) -> HeadFit:
    """Draft behind every prompt as the base spoke; then see whether another setting explains it better."""
    base, head = load_whole(options), load_trial(options, options.overrides)
    lengths = [(prompt, len(written)) for prompt, written in spoken]
    found = HeadFit(draft(base, head, lengths), about=describe(head))
    if isinstance(head, BlockHead):  # a text's rows have no outputs that could explain it
        return found
    taps = None if isinstance(head.fusion, FinalHidden) else head.taps
    trials = think_of_trials(options.overrides, taps, base.config.layers, base.config.rope.theta)
    told = {trial: explain(base, load_trial(options, trial), spoken) for trial in trials}
    chosen = choose_trial(explain(base, head, spoken), told)
    if chosen is None:
        return found
    return replace(found, trial=chosen, better=draft(base, load_trial(options, chosen), lengths))


@torch.inference_mode()
def draft(base: Decoder, head: EagleHead, wanted: Sequence[tuple[Sequence[int], int]]) -> Acceptance:
    """Drafts accepted in every lap of writing so many tokens behind each prompt, all side by side."""
    left = {number: tokens for number, (_, tokens) in enumerate(wanted) if tokens}
    limits = {number: tokens + SHAPE.depth + 2 for number, tokens in left.items()}  # no tree is cut short
    prompts = {number: tuple(wanted[number][0]) for number in left}
    orders = [
        Open(Opening(one, len(prompt), limit=limits[one]), prompt, len(prompt) + limits[one])
        for one, prompt in prompts.items()
    ]
    laps, lengths = open_loop(TargetAndDraft(base, head), SHAPE, orders), list[int]()
    while left:
        for outcome in laps.turn().result.outcomes:
            if outcome.accepted and outcome.sequence in left:
                lengths.append(len(outcome.accepted) - 1)
                left[outcome.sequence] -= len(outcome.accepted)
        left = {number: tokens for number, tokens in left.items() if tokens > 0}
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
    assert fused is not None
    outputs, _ = feed_head(head, tokens[1:-1], head.features(fused))
    wanted = own[tokens[len(prompt) :]]
    chances = head.log_probs(outputs[skipped:])[wanted >= 0]
    return chances.gather(1, wanted[wanted >= 0, None])[:, 0].tolist()
