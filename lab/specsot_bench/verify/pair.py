"""Verifies a model pair: asks a fleet, compares its answers with the reference, measures the head.

The steps run one after another, so that only one copy of the model is in memory at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.core.frames import Open, Opening
from specsot.events import Reason
from specsot.members import Overrides, TreeShape
from specsot.params import DrafterName, Message
from specsot.service.options import DraftModelOptions
from specsot_app.core.ask import ask_of
from specsot_app.fleet.demo import questions_of
from specsot_app.fleet.opening import FleetClient, Opener, finished_answer, open_fleet
from specsot_app.fleet.options import FleetOptions, models_of, resolved
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.verify_report import (
    Acceptance,
    CheckedAnswer,
    HeadFit,
    Report,
    as_json,
    choose_trial,
    lines_of,
    think_of_trials,
)
from specsot_bench.eagle.generation import open_loop
from specsot_bench.eagle.models import TargetAndDraft
from specsot_bench.reference_model import compare, feed_base, feed_head, load_whole, of_base, of_transformers
from specsot_drafter.block_graphs import can_capture_block
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.heads.eagle import Eagle3Head, EagleHead, FinalHidden
from specsot_drafter.heads.fused import can_fuse
from specsot_drafter.loader import EagleBackend
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.fused import can_capture
from specsot_model.linear import resolve_dtype
from specsot_model.published import as_published

SHAPE = TreeShape(fixed=True)
NAMES = {"eagle1": "EAGLE-1 or EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash"}

# (prompt, what the base wrote after it), as token ids.
WrittenTexts = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def describe_base(config: ModelConfig) -> str:
    """Return what runs of a base, and how."""
    stored = f", {config.published} weights" if config.published else ""
    graphs = "with" if can_capture(config, kernels=True, rounded=False) else "without"
    reach = f"{config.layers} layers, any ranges of them, {config.max_positions} positions"
    name = f"{config.text_of} (text only)" if config.text_of else config.model_type
    return f"{name}: {reach}{stored}; on GPUs {graphs} CUDA graphs"


def describe(head: EagleHead) -> tuple[str, ...]:
    """Return the head's family, how it drafts and from what, and what of this package works with it."""
    name = NAMES[head.kind]
    drafts = "a pass for every level of a tree"
    window = head.decoder.window
    if isinstance(head, BlockHead):
        drafts = f"one pass for {head.block.drafts} tokens"
    elif isinstance(head, Eagle3Head) and head.mask:
        name = "P-EAGLE"
        learned = head.mask.depth
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
    """Load the head with these settings."""
    head = EagleBackend(replace(options, overrides=overrides)).load()
    assert isinstance(head, EagleHead)
    return head


@torch.inference_mode()
def measure_fit(options: DraftModelOptions, spoken: WrittenTexts) -> HeadFit:
    """Measure the acceptance of the head; then search for settings that explain the base's text better."""
    base = load_whole(options)
    head = load_trial(options, options.overrides)
    lengths = [(prompt, len(written)) for prompt, written in spoken]
    found = HeadFit(draft(base, head, lengths), about=describe(head))
    # A block head gives no outputs for the rows of a text, so that no settings can be compared.
    if isinstance(head, BlockHead):
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
    """Return the accepted drafts of every step while so many tokens are written after each prompt, all in one
    batch.
    """
    left = {number: tokens for number, (_, tokens) in enumerate(wanted) if tokens}
    # A higher limit, so that no tree is cut short near the end.
    limits = {number: tokens + SHAPE.depth + 2 for number, tokens in left.items()}
    prompts = {number: tuple(wanted[number][0]) for number in left}
    orders = [
        Open(Opening(one, len(prompt), limit=limits[one]), prompt, len(prompt) + limits[one])
        for one, prompt in prompts.items()
    ]
    steps = open_loop(TargetAndDraft(base, head), SHAPE, orders)
    lengths = list[int]()
    while left:
        for outcome in steps.turn().result.outcomes:
            if outcome.accepted and outcome.sequence in left:
                lengths.append(len(outcome.accepted) - 1)
                left[outcome.sequence] -= len(outcome.accepted)
        left = {number: tokens for number, tokens in left.items() if tokens > 0}
    return Acceptance(tuple(lengths))


def explain(base: Decoder, head: EagleHead, spoken: WrittenTexts) -> list[float]:
    """Return the log-probability that the head gives each token the base wrote, from the base's true hidden
    states.

    Tokens that the head cannot draft are left out.
    """
    drafted = head.to_target(torch.arange(head.draft_vocab, device=head.device))
    own = torch.full((base.config.vocab,), -1, device=head.device)
    own[drafted] = torch.arange(head.draft_vocab, device=head.device)
    return [chance for prompt, written in spoken for chance in _explain(base, head, own, prompt, written)]


def _explain(
    base: Decoder, head: EagleHead, own: Tensor, prompt: Sequence[int], written: Sequence[int]
) -> list[float]:
    """Compute `explain` for one text. Row j pairs the hidden state of token j with token j + 1, and predicts
    token j + 2.

    With a prompt of 3 tokens and 2 written ones there are rows 0..2; rows 1 and 2 predict the written tokens
    3 and 4.
    """
    tokens = torch.tensor([*prompt, *written], device=head.device)
    rows = len(tokens) - 2
    skipped = len(prompt) - 2
    if rows <= skipped or skipped < 0:
        return []
    _, fused = feed_base(base, tokens[:rows], head.tap_slices())
    assert fused is not None
    outputs, _ = feed_head(head, tokens[1:-1], head.features(fused))
    wanted = own[tokens[len(prompt) :]]
    chances = head.log_probs(outputs[skipped:])[wanted >= 0]
    return chances.gather(1, wanted[wanted >= 0, None])[:, 0].tolist()


QUESTIONS = (
    "Explain how photosynthesis works.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the main differences between TCP and UDP?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "请用三句话介绍长城。",
)


def choose_questions(file: Path | None, of_demo: bool) -> tuple[str, ...]:
    """Return the file's questions; else some that the demo was trained on, or some for any model. Raises
    InvalidRequest.
    """
    asked = questions_of(file, of_demo, QUESTIONS)
    return asked if file else asked[: len(QUESTIONS)]


# Questions that are answered at a time: the effect of a batch on an answer is part of what is verified.
SIDE_BY_SIDE = 4


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """One greedy answer of the fleet.

    question: the question.
    prompt: token ids of the prompt.
    tokens: token ids of the answer, without the end token.
    ended: the model ended the answer by itself.
    per_step: tokens of a step, 1.0 without drafts.
    """

    question: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: bool
    per_step: float


async def ask_all(
    fleet: FleetClient,
    prompts: Prompts,
    questions: Sequence[str],
    drafter: DrafterName,
    tokens: int,
    step: Callable[[], None],
) -> list[FleetAnswer]:
    """Ask every question once; return answers of at most `tokens` tokens, in the order of the questions.

    step: called after each answer.
    """
    places = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(question: str) -> FleetAnswer:
        async with places:
            served = await _ask(fleet, prompts, question, drafter, tokens)
        step()
        return served

    tasks = [asyncio.ensure_future(one(question)) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _ask(
    fleet: FleetClient, prompts: Prompts, question: str, drafter: DrafterName, tokens: int
) -> FleetAnswer:
    """Ask one question."""
    ask = ask_of(question, mode="direct", drafter=drafter, temperature=0.0, max_new_tokens=tokens)
    finished = await finished_answer(fleet, ask)
    prompt = prompts.chat((Message("user", question),))
    ended = finished.reason is Reason.STOP
    return FleetAnswer(question, prompt, finished.tokens, ended, finished.statistics.mean_accepted)


# Stages. Two by default, so that splitting the layers is verified, too.
STAGES = 2


def verify(
    wanted: FleetOptions,
    file: Path | None,
    tokens: int,
    near: float,
    as_object: bool,
    opener: Opener = open_fleet,
) -> int:
    """Print what was found; return 0 if every answer is the reference's and the head fits, else 1.

    wanted: the fleet, and where its models lie on this machine (a remote master has its own copies).
    tokens: most tokens of each answer.
    near: gap of the two largest logits below which a difference is a matter of rounding.
    """
    questions = choose_questions(file, wanted.model is None)
    report = examine(_put_to_the_test(wanted), questions, tokens, near, opener)
    text = Text(models_of(wanted).base)
    if as_object:
        print(json.dumps(as_json(report)))
    else:
        print("\n".join(lines_of(report, lambda token: text.decode((token,)))))
    return 0 if report.holds else 1


def examine(
    wanted: FleetOptions, questions: Sequence[str], tokens: int, near: float, opener: Opener
) -> Report:
    """Ask the fleet, then the reference, then the head. Raises what opening and loading raise."""
    quiet_logs()
    models = models_of(wanted)
    wanted = as_published(wanted, models.base)
    # A local fleet uses its own drafter; of a remote fleet, a drafter is asked for by name.
    drafter: DrafterName = models.drafts if wanted.master is None else wanted.drafter or "eagle"
    served = run_until_signal(_serve(wanted, models.base, questions, drafter, tokens, opener))
    answers = _compare(replace(wanted, model=models.base), served)
    fit = None
    spoken = [(one.prompt, one.tokens) for one in served if one.tokens]
    if models.draft is not None and drafter == "eagle" and spoken:
        with counting_bar(sys.stderr, "drafting them with the head", 1):
            fit = measure_fit(resolved(wanted, models), spoken)
    return Report(answers, near, drafter, fit, _rounding(wanted), describe_base(read_config(models.base)))


async def _serve(
    wanted: FleetOptions,
    base: Path,
    questions: Sequence[str],
    drafter: DrafterName,
    tokens: int,
    opener: Opener,
) -> list[FleetAnswer]:
    """Open the fleet, ask all questions, and close it."""
    fleet = await opener(wanted)
    try:
        prompts = Prompts(base, Text(base))
        with counting_bar(sys.stderr, "asking the fleet", len(questions)) as step:
            return await ask_all(fleet, prompts, questions, drafter, tokens, step)
    finally:
        await fleet.close()


def _compare(wanted: FleetOptions, served: list[FleetAnswer]) -> tuple[CheckedAnswer, ...]:
    """Compare the answers with the reference."""
    numbers = resolve_dtype(wanted.dtype, wanted.device, wanted.quantization)
    if _rounding(wanted):
        reference = of_base(load_whole(wanted))
    else:
        reference = of_transformers(wanted.base, numbers, wanted.device)
    ends = Text(wanted.base).end_ids
    answers: list[CheckedAnswer] = []
    with counting_bar(sys.stderr, "reading the answers again", len(served)) as step:
        for one in served:
            found = compare(reference, one.prompt, one.tokens, ends if one.ended else None)
            answers.append(CheckedAnswer(one.question, len(one.tokens), one.per_step, tuple(found)))
            step()
    return tuple(answers)


def _rounding(wanted: FleetOptions) -> str:
    """Return the precision of the base in words, if its rounding makes a different model of it; else ""."""
    kept = "int8 KV" if wanted.kv_cache_dtype == "int8" else None
    return ", ".join(filter(None, (wanted.quantization, kept)))


def _put_to_the_test(wanted: FleetOptions) -> FleetOptions:
    """Return options with a tree in every step, and two stages unless stages were chosen or the model has one
    layer.
    """
    if wanted.stages is None and wanted.layers is None:
        wanted = replace(wanted, stages=min(STAGES, read_config(models_of(wanted).base).layers))
    return replace(wanted, tree="fixed")
