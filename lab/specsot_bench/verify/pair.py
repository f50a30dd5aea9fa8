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
from specsot.checkpoint.resolving import address_of_model
from specsot.core.frames import Open, Opening
from specsot.events import Reason
from specsot.members import Overrides, TreeShape
from specsot.params import DrafterName, Message
from specsot.service.options import DraftModelOptions
from specsot_app.core.ask import ask_of
from specsot_app.fleet.opening import FleetClient, Opener, open_fleet
from specsot_app.fleet.options import FleetOptions, models_of, resolved
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_bench.asking import counting_bar, finished_answer, questions_of
from specsot_bench.core.verify_report import (
    Acceptance,
    CheckedAnswer,
    HeadFit,
    Report,
    as_json,
    choose_trial,
    lines_of,
    settings_to_try,
)
from specsot_bench.eagle.generation import open_loop
from specsot_bench.eagle.models import TargetAndDraft
from specsot_bench.reference_model import (
    compare,
    feed_base,
    feed_head,
    load_decoder,
    of_base,
    of_transformers,
)
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
from specsot_model.stored_form import as_published

# The trees with which acceptance is measured: of the default size, always.
SHAPE = TreeShape(fixed=True)
# What each kind of head is called.
NAMES = {"eagle1": "EAGLE-1 or EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}

# (prompt, what the base wrote after it), as token ids.
WrittenTexts = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def describe_base(config: ModelConfig) -> str:
    """Return in one line what a base is, which layer ranges and positions it has, and whether CUDA graphs run
    it.

    A model that also reads images is named by its text part, with "(text only)", and a family that our
    decoder does not know with "(through Transformers)". Weights that were published in fewer bits are named.

    config: Config of the base model.
    """
    stored = f", {config.published} weights" if config.published else ""
    with_graphs = "with" if can_capture(config, kernels=True, any_quantized=False) else "without"
    size = f"{config.layers} layers, any ranges of them, {config.max_positions} positions"
    name = f"{config.text_of} (text only)" if config.text_of else config.model_type
    name += " (through Transformers)" if config.transformers is not None else ""
    return f"{name}: {size}{stored}; on GPUs {with_graphs} CUDA graphs"


def describe(head: EagleHead) -> tuple[str, ...]:
    """Return in a few lines the head's family, how it drafts and from what, and what of this package works
    with it.

    The last line is the same for every head, except for CUDA graphs.

    head: The loaded head.
    """
    name = NAMES[head.kind]
    passes = "a pass for every level of a tree"
    window = head.decoder.window
    if isinstance(head, BlockHead):
        passes = f"one pass for {head.block.drafts} tokens"
    elif isinstance(head, Eagle3Head) and head.mask:
        name = "P-EAGLE"
        learned_depth = head.mask.depth
        passes = (
            f"one pass for {learned_depth} tokens" if learned_depth else "one pass for all levels of a tree"
        )
    window_text = f", {len(window.layers)} of which see {window.rows} positions" if window else ""
    with_graphs = "with" if can_fuse(head) or can_capture_block(head) else "without"
    return (
        name,
        f"{passes}, from what enters layers {', '.join(map(str, head.taps))} of the base",
        f"layers: {head.layers}{window_text}; ids: {head.draft_vocab}; positions: {head.positions}",
        "chains and trees, branches, sampling, grammars, layer ranges, --draft-quantization;"
        f" on GPUs {with_graphs} CUDA graphs",
    )


def load_trial(options: DraftModelOptions, overrides: Overrides) -> EagleHead:
    """Return the head, loaded with these settings.

    options: Options that name the head and its precision.
    overrides: Settings that replace those of the head's config.
    """
    head = EagleBackend(replace(options, overrides=overrides)).load()
    assert isinstance(head, EagleHead)
    return head


@torch.inference_mode()
def measure_fit(options: DraftModelOptions, written_texts: WrittenTexts) -> HeadFit:
    """Return the acceptance of the head; and settings that explain the base's text better, if there are any.

    A block head (DFlash, DSpark) is measured with its own settings alone. A head that reads only the final
    hidden state has no taps to try. Without better settings, `trial` and `better` keep their defaults.

    options: Options that name base and head, and their precision.
    written_texts: Token ids of each prompt, and of the answer that the base wrote.
    """
    base = load_decoder(options)
    head = load_trial(options, options.overrides)
    lengths = [(prompt, len(written)) for prompt, written in written_texts]
    fit = HeadFit(measure_acceptance(base, head, lengths), about=describe(head))
    # A block head gives no outputs for the rows of a text, so that no settings can be compared.
    if isinstance(head, BlockHead):
        return fit
    taps = None if isinstance(head.fusion, FinalHidden) else head.taps
    trials = settings_to_try(options.overrides, taps, base.config.layers, base.config.rope.theta)
    log_probs = {trial: log_probs_of(base, load_trial(options, trial), written_texts) for trial in trials}
    best_trial = choose_trial(log_probs_of(base, head, written_texts), log_probs)
    if best_trial is None:
        return fit
    return replace(
        fit, trial=best_trial, better=measure_acceptance(base, load_trial(options, best_trial), lengths)
    )


@torch.inference_mode()
def measure_acceptance(
    base: Decoder, head: EagleHead, prompts_and_lengths: Sequence[tuple[Sequence[int], int]]
) -> Acceptance:
    """Return the accepted drafts of every step while so many tokens are written after each prompt, all in one
    batch.

    Trees have the default size always. Each entry's last step may write more than the wanted tokens, and
    counts whole. Without entries of at least one token, the result has no lengths.

    base: The loaded base, with all layers.
    head: The loaded head.
    prompts_and_lengths: Token ids of each prompt, and the number of tokens to write after it; entries of 0
        tokens are left out.
    """
    tokens_left = {number: tokens for number, (_, tokens) in enumerate(prompts_and_lengths) if tokens}
    # A higher limit, so that no tree is cut short near the end.
    limits = {number: tokens + SHAPE.depth + 2 for number, tokens in tokens_left.items()}
    prompts = {number: tuple(prompts_and_lengths[number][0]) for number in tokens_left}
    orders = [
        Open(Opening(number, len(prompt), limit=limits[number]), prompt, len(prompt) + limits[number])
        for number, prompt in prompts.items()
    ]
    steps = open_loop(TargetAndDraft(base, head), SHAPE, orders)
    lengths = list[int]()
    while tokens_left:
        for outcome in steps.turn().result.outcomes:
            if outcome.accepted and outcome.sequence in tokens_left:
                lengths.append(len(outcome.accepted) - 1)
                tokens_left[outcome.sequence] -= len(outcome.accepted)
        tokens_left = {number: tokens for number, tokens in tokens_left.items() if tokens > 0}
    return Acceptance(tuple(lengths))


def log_probs_of(base: Decoder, head: EagleHead, written_texts: WrittenTexts) -> list[float]:
    """Return the log-probability that the head gives each token the base wrote, from the base's true hidden
    states.

    Tokens that the head cannot draft are left out.

    The order is that of the texts, and within a text that of the written tokens. A text whose prompt has
    fewer than 2 tokens gives nothing.

    base: The loaded base, with all layers.
    head: The loaded head.
    written_texts: Token ids of each prompt, and of the answer that the base wrote.
    """
    drafted = head.to_target(torch.arange(head.draft_vocab, device=head.device))
    draft_ids = torch.full((base.config.vocab,), -1, device=head.device)
    draft_ids[drafted] = torch.arange(head.draft_vocab, device=head.device)
    return [
        log_prob
        for prompt, written in written_texts
        for log_prob in _log_probs_of(base, head, draft_ids, prompt, written)
    ]


def _log_probs_of(
    base: Decoder, head: EagleHead, draft_ids: Tensor, prompt: Sequence[int], written: Sequence[int]
) -> list[float]:
    """Compute `log_probs_of` for one text. Row j pairs the hidden state of token j with token j + 1, and
    predicts token j + 2.

    With a prompt of 3 tokens and 2 written ones there are rows 0..2; rows 1 and 2 predict the written tokens
    3 and 4. Without a row to read, the result is empty.

    Tokens that the head cannot draft are left out. A prompt of fewer than 2 tokens also gives an empty
    result.

    base: The loaded base, with all layers.
    head: The loaded head.
    draft_ids: Number that the head has for each token id of the base, [vocab_size]; -1 for tokens that it
        cannot draft.
    prompt: Token ids of the prompt.
    written: Token ids of the answer.
    """
    tokens = torch.tensor([*prompt, *written], device=head.device)
    num_rows = len(tokens) - 2
    first_row = len(prompt) - 2
    if num_rows <= first_row or first_row < 0:
        return []
    _, fused = feed_base(base, tokens[:num_rows], head.tap_slices())
    assert fused is not None
    outputs, _ = feed_head(head, tokens[1:-1], head.features(fused))
    target_ids = draft_ids[tokens[len(prompt) :]]
    log_probs = head.log_probs(outputs[first_row:])[target_ids >= 0]
    return log_probs.gather(1, target_ids[target_ids >= 0, None])[:, 0].tolist()


# Questions that are asked unless a file is given: prose, code, arithmetic, and another script.
QUESTIONS = (
    "Explain how photosynthesis works.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the main differences between TCP and UDP?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "请用三句话介绍长城。",
)


def choose_questions(file: Path | None, is_demo: bool) -> tuple[str, ...]:
    """Return the file's questions; else some that the demo was trained on, or some for any model.

    file: File with one question a line; None: no file was given.
    is_demo: True if the bundled small model answers.
    Raises InvalidRequest for an unreadable file.
    """
    questions = questions_of(file, is_demo, QUESTIONS)
    return questions if file else questions[: len(QUESTIONS)]


# Questions that are answered at a time: the effect of a batch on an answer is part of what is verified.
# Untuned.
MAX_CONCURRENT = 4


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """One greedy answer of the fleet.

    question: The question as plain text.
    prompt: Token ids of the prompt.
    tokens: Token ids of the answer, without the end token.
    ended: True if the model ended the answer by itself.
    per_step: Mean number of tokens of a step, 1.0 without drafts.
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
    max_tokens: int,
    advance: Callable[[], None],
) -> list[FleetAnswer]:
    """Ask every question once, MAX_CONCURRENT at a time; return the answers in the order of the questions.

    If one answer fails, the others are cancelled, and its error is raised.

    fleet: The client that answers.
    prompts: Builds the token ids of a question.
    questions: Questions as plain texts.
    drafter: Kind of drafter that the fleet is asked to use.
    max_tokens: Maximum number of tokens of an answer.
    advance: Called after each answer, without arguments.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def answer_one(question: str) -> FleetAnswer:
        """Return the answer to one question, once a slot is free.

        question: The question as plain text.
        """
        async with slots:
            answer = await _ask(fleet, prompts, question, drafter, max_tokens)
        advance()
        return answer

    tasks = [asyncio.ensure_future(answer_one(question)) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _ask(
    fleet: FleetClient, prompts: Prompts, question: str, drafter: DrafterName, max_tokens: int
) -> FleetAnswer:
    """Return the greedy answer to one question.

    The answer is not planned, and its temperature is 0.

    fleet: The client that answers.
    prompts: Builds the token ids of a question.
    question: The question as plain text.
    drafter: Kind of drafter that the fleet is asked to use.
    max_tokens: Maximum number of tokens of the answer.
    Raises Unavailable if the answer ended for another reason than STOP or LENGTH.
    """
    ask = ask_of(question, mode="direct", drafter=drafter, temperature=0.0, max_new_tokens=max_tokens)
    finished = await finished_answer(fleet, ask)
    prompt = prompts.chat((Message("user", question),))
    ended = finished.reason is Reason.STOP
    return FleetAnswer(question, prompt, finished.tokens, ended, finished.statistics.mean_accepted)


# Stages. Two by default, so that splitting the layers is verified, too.
STAGES = 2


def verify(
    options: FleetOptions,
    prompts_file: Path | None,
    max_tokens: int,
    tie_gap: float,
    as_one_object: bool,
    opener: Opener = open_fleet,
) -> int:
    """Print the report of a verification; return 0 if every answer is the reference's and the head, if any,
    fits, else 1.

    The exit status is also 0 if differences are only a matter of rounding, as `Report.holds` decides. Raises
    what opening and loading raise.

    options: Options of the fleet, and where its models lie on this machine (a remote master has its own
        copies).
    prompts_file: File of questions, one a line; None: the built-in questions are asked.
    max_tokens: Maximum number of tokens of each answer.
    tie_gap: Gap of the two largest logits below which a difference is a matter of rounding.
    as_one_object: True: print JSON instead of lines.
    opener: Opens the fleet.
    """
    questions = choose_questions(prompts_file, options.model is None)
    report = examine(_with_test_options(options), questions, max_tokens, tie_gap, opener)
    text = Text(models_of(options).base)
    if as_one_object:
        print(json.dumps(as_json(report)))
    else:
        print("\n".join(lines_of(report, lambda token: text.decode((token,)))))
    return 0 if report.holds else 1


def examine(
    options: FleetOptions, questions: Sequence[str], max_tokens: int, tie_gap: float, opener: Opener
) -> Report:
    """Ask the fleet, then the reference, then the head; return what was found. Raises what opening and
    loading raise.

    The head is measured only if a head is loaded, "eagle" drafts, and some answer has tokens; otherwise the
    report has no fit.

    options: Options of the fleet.
    questions: Questions as plain texts.
    max_tokens: Maximum number of tokens of each answer.
    tie_gap: Gap of the two largest logits below which a difference is a matter of rounding.
    opener: Opens the fleet.
    """
    quiet_logs()
    models = models_of(options)
    options = as_published(options, models.base)
    # A local fleet uses its own drafter; of a remote fleet, a drafter is asked for by name.
    drafter: DrafterName = models.drafts if options.master is None else options.drafter or "eagle"
    fleet_answers = run_until_signal(
        _answers_of_fleet(options, models.base, questions, drafter, max_tokens, opener)
    )
    answers = _compare(replace(options, model=models.base), fleet_answers)
    fit = None
    written_texts = [(answer.prompt, answer.tokens) for answer in fleet_answers if answer.tokens]
    if models.draft is not None and drafter == "eagle" and written_texts:
        with counting_bar(sys.stderr, "drafting them with the head", 1):
            fit = measure_fit(resolved(options, models), written_texts)
    about = describe_base(read_config(models.base))
    names = [address_of_model(directory) if directory else "" for directory in (models.base, models.draft)]
    return Report(answers, tie_gap, drafter, fit, _rounding(options), about, *names)


async def _answers_of_fleet(
    options: FleetOptions,
    base: Path,
    questions: Sequence[str],
    drafter: DrafterName,
    max_tokens: int,
    opener: Opener,
) -> list[FleetAnswer]:
    """Open the fleet, ask all questions, and close it; return the answers in the order of the questions.

    The fleet is closed even if a question fails.

    options: Options of the fleet.
    base: Directory of the base model.
    questions: Questions as plain texts.
    drafter: Kind of drafter that the fleet is asked to use.
    max_tokens: Maximum number of tokens of each answer.
    opener: Opens the fleet.
    """
    fleet = await opener(options)
    try:
        prompts = Prompts(base, Text(base))
        with counting_bar(sys.stderr, "asking the fleet", len(questions)) as advance:
            return await ask_all(fleet, prompts, questions, drafter, max_tokens, advance)
    finally:
        await fleet.close()


def _compare(options: FleetOptions, fleet_answers: list[FleetAnswer]) -> tuple[CheckedAnswer, ...]:
    """Return the answers with their differences from the reference.

    A base whose quantization or KV format rounds is compared with SpecSoT's own decoder of the same
    precision, any other with Transformers. The end token is compared only where the model ended the answer
    by itself.

    options: Options that name the base model and its precision.
    fleet_answers: Answers of the fleet.
    """
    dtype = resolve_dtype(options.dtype, options.device, options.stored_form)
    if _rounding(options):
        reference = of_base(load_decoder(options))
    else:
        reference = of_transformers(options.base, dtype, options.device)
    end_ids = Text(options.base).end_ids
    answers: list[CheckedAnswer] = []
    with counting_bar(sys.stderr, "reading the answers again", len(fleet_answers)) as advance:
        for answer in fleet_answers:
            differences = compare(reference, answer.prompt, answer.tokens, end_ids if answer.ended else None)
            answers.append(
                CheckedAnswer(answer.question, len(answer.tokens), answer.per_step, tuple(differences))
            )
            advance()
    return tuple(answers)


def _rounding(options: FleetOptions) -> str:
    """Return the precision of the base in words, if its rounding makes a different model of it; else an empty
    text.

    options: Options of the fleet.
    """
    kv_format = "int8 KV" if options.kv_cache_dtype == "int8" else None
    return ", ".join(filter(None, (options.stored_form, kv_format)))


def _with_test_options(options: FleetOptions) -> FleetOptions:
    """Return options with a tree in every step, and two stages unless stages were chosen or the model has one
    layer.

    options: Options of the fleet.
    """
    if options.stages is None and options.layers is None:
        options = replace(options, stages=min(STAGES, read_config(models_of(options).base).layers))
    return replace(options, tree="fixed")
