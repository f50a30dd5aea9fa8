"""The gain of speculation and branches on one GPU, with acceptance as published and costs as measured.

Acceptance is replayed, see `gpu_replay`. All times are wall-clock times of whole steps whose results the host
reads, compared with decoding without speculation by the same stage without taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specsot.core.pages import PageTable
from specsot.members import Curve, TreeShape
from specsot_drafter.heads import DraftHead
from specsot_drafter.loader import measure_levels
from specsot_lab.bench.acceptance import chance_of
from specsot_lab.bench.clock import StepClock, captured, median_seconds
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import PAGE, Drafting, GpuLoop, RequestPart
from specsot_lab.bench.gpu_replay import scaled_ranks
from specsot_lab.bench.gpu_steps import BF16_BYTES, Speeds, floor_of_draft, floor_of_step, step_call
from specsot_lab.bench.synthetic_models import bytes_of_kv
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages

# Tokens of the instructions of a plan, after the request's own, as general instruct models get them, in
# English, by the demo model's tokenizer.
PLAN_PROMPT: Final = 221
# Tokens of the instructions of one of six points whose titles have five words, likewise.
POINT_PROMPT: Final = 94

# Tokens of each point of a plan that the demo model wrote before it was trained further, none of them
# truncated, as branch_finished reported after `specsot infer --json --mode sot --drafter none "Outline the
# topic of Business Structures and explain each point."`: the only one of 29 plans that had six points.
PLANS: Final = ((34, 22, 18, 14, 22, 12),)


def scaled_lengths(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """Return lengths in the same proportions that sum to `total`: ((1, 3), 8) -> (2, 6). A short length may
    become 0.

    lengths: At least one positive number.
    total: The sum of the result.
    """
    ends = [round(total * sum(lengths[: index + 1]) / sum(lengths)) for index in range(len(lengths))]
    return tuple(end - start for start, end in zip((0, *ends), ends))


# Figures by name.
Row = dict[str, object]

# Tokens per step of EAGLE-3 on Llama-3.1-8B-Instruct, MT-bench, temperature 0, as published.
TAU: Final = 6.13
# Depth of the published tree.
DEPTH: Final = 7
# Children of a node of the published tree.
TOP_K: Final = 10
# Nodes of the published tree, root included.
NODES: Final = 60
# Probability that a level is right, with which the published tree yields TAU tokens per step.
CHANCE: Final = chance_of(TAU, DEPTH + 1)
# Branches of one request.
BRANCHES: Final = 6
# Rows of all trees of a step together, roots included. Untuned.
BUDGET: Final = 198
# Steps of a run.
STEPS: Final = 150
# Numbers of simultaneous requests.
REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64)
# Tokens in the KV cache before each of several simultaneous sequences.
REQUEST_CONTEXT: Final = 256
# Steps of a run of several simultaneous requests.
REQUEST_STEPS: Final = 100
# Tokens of the skeleton of a request.
SKELETON: Final = 150
# Mean tokens of a branch of a request.
BRANCH: Final = 150
# Repetitions of a whole request, of which the median is the result.
TIMES: Final = 3
# Tokens of each sequence of the request that runs before, to compile kernels.
WARM_TOKENS: Final = 8
# Maximum number of rows of a frame.
ROWS: Final = 512
# KV pages of PAGE rows.
PAGES: Final = 1600
# Tokens of a long context.
LONG: Final = 32_768


@dataclass(frozen=True, slots=True)
class Baseline:
    """What speculation is compared with: the speed of decoding without speculation, and the shortest possible
    steps.

    decoder: The whole base model.
    speeds: The measured speeds of the device.
    context_length: KV rows that each step reads.
    tokens_per_second: Speed of decoding without speculation, of all sequences together.
    draft_seconds: The shortest possible seconds of a draft; 0 without drafts.
    """

    decoder: Decoder
    speeds: Speeds
    context_length: int
    tokens_per_second: float
    draft_seconds: float = 0.0

    def floor(self, clock: StepClock) -> float:
        """Return the shortest possible seconds of a whole run.

        clock: The run, of which the number of rows of each step is read.

        The result is the sum over the steps of the run of the shortest step with as many rows, each with
        `draft_seconds` added; 0 without steps.
        """
        config = self.decoder.config
        speeds = self.speeds
        return sum(
            floor_of_step(config, speeds, rows, self.context_length) + self.draft_seconds
            for rows in clock.step_rows
        )


def measure_speculation(decoder: Decoder, context_length: int, speeds: Speeds) -> Iterator[Row]:
    """Yield the rows of drafting and branches.

    decoder: The whole base model, with weights that predict the next higher token id, see `NextTokenWeights`.
    context_length: Number of tokens in the KV cache before what is measured.
    speeds: The measured speeds of the device.

    The rows come in this order: one sequence and six branches without drafts, whole requests, the same with
    drafts, the same with a head in 8-bit floats, simultaneous requests, and memory.
    """
    head = made_up_head(decoder, head_shape(decoder.config))
    shape = TreeShape(DEPTH, TOP_K, NODES, fixed=True)
    undrafted = GpuLoop(decoder, PAGES, ROWS, None)
    undrafted_clock = undrafted.run(context_length, 1, STEPS)
    baseline = Baseline(decoder, speeds, context_length, speed_of(undrafted_clock))
    yield figures_of("plain", undrafted_clock, baseline)
    yield figures_of("sot", undrafted.run(context_length, BRANCHES, STEPS, forked=True), baseline, BRANCHES)
    yield from _request_rows("sot", undrafted, baseline)
    yield from _drafting_rows(decoder, head, shape, baseline)
    fp8_head = made_up_head(decoder, head_shape(decoder.config), "fp8")
    yield from _drafting_rows(decoder, fp8_head, shape, baseline, ", fp8 head", 1)
    step: Curve = tuple((rows, seconds * decoder.config.layers) for rows, seconds in measure_rows(decoder))
    tuned = TreeShape(DEPTH, TOP_K, NODES)
    # By rank, because the tuner relies on scores that are the true chances of the nodes.
    ranks = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)
    drafting = Drafting(head, tuned, ranks, ROWS, step, measure_levels(head))
    yield from _concurrency_rows(undrafted, GpuLoop(decoder, PAGES, ROWS, drafting), baseline)
    yield from _memory_rows(decoder, context_length, speeds)


def _drafting_rows(
    decoder: Decoder,
    head: DraftHead,
    shape: TreeShape,
    baseline: Baseline,
    label: str = "",
    weight_bytes: int = BF16_BYTES,
) -> Iterator[Row]:
    """Yield the rows of one sequence, six branches and whole requests with drafts. A head in 8-bit floats is
    replayed with the same acceptance as one in bf16.

    decoder: The whole base model.
    head: The head, which runs for its cost.
    shape: The tree.
    baseline: What results are compared with.
    label: Appended to the names of the rows.
    weight_bytes: Bytes of a weight of the head.

    The trees have a fixed shape.
    """
    loop = GpuLoop(decoder, PAGES, ROWS, Drafting(head, shape, CHANCE, BUDGET))
    draft_seconds = floor_of_draft(head_shape(decoder.config), baseline.speeds, DEPTH + 1, weight_bytes)
    baseline = replace(baseline, draft_seconds=draft_seconds)
    yield figures_of(f"eagle{label}", loop.run(baseline.context_length, 1, STEPS), baseline)
    yield figures_of(
        f"both{label}", loop.run(baseline.context_length, BRANCHES, STEPS, forked=True), baseline, BRANCHES
    )
    yield from _request_rows(f"both{label}", loop, baseline)


def _request_rows(way: str, loop: GpuLoop, baseline: Baseline) -> Iterator[Row]:
    """Yield the rows of whole requests: a skeleton, then its branches until the last one has ended, compared
    with decoding as many tokens without speculation.

    way: Name of the way to decode.
    loop: The loop that writes the requests.
    baseline: What results are compared with. It has no prompts but that of the context, while the request
        computes the prompts of the plan and of its points.

    There is a row for branches of equal length, and one for each of PLANS, scaled to the same total. Each
    request is written TIMES times; the row has the figures of the median run, and the least and the largest
    speed-up.
    """
    # The first request compiles the kernels of prompts.
    loop.write(baseline.context_length, _parts(WARM_TOKENS, (WARM_TOKENS,) * BRANCHES))
    for lengths in (BRANCH,) * BRANCHES, *(scaled_lengths(plan, BRANCHES * BRANCH) for plan in PLANS):
        written = [loop.write(baseline.context_length, _parts(SKELETON, lengths)) for _ in range(TIMES)]
        clocks = sorted(written, key=lambda clock: clock.total_seconds)
        gains = [round(speed_of(each_clock) / baseline.tokens_per_second, 2) for each_clock in clocks]
        clock = clocks[TIMES // 2]
        speed_without_prompts = (clock.tokens - clock.prompt_step_tokens) / (
            clock.total_seconds - clock.prompt_seconds
        )
        yield {
            "what": f"replayed, whole request, {way}",
            "branches": " ".join(map(str, lengths)),
            "skeleton": SKELETON,
            "ms": round(clock.total_seconds * 1e3, 1),
            "of them with prompts ms": round(clock.prompt_seconds * 1e3, 1),
            **_figures(clock, baseline),
            "x plain, least": gains[-1],
            "x plain, most": gains[0],
            "x plain without steps with prompts": round(
                speed_without_prompts / baseline.tokens_per_second, 2
            ),
        }


def _parts(skeleton: int, branches: Sequence[int]) -> tuple[RequestPart, RequestPart]:
    """Return the two parts of a request: its skeleton and its branches.

    skeleton: Tokens of the skeleton.
    branches: Tokens of each branch.
    """
    return RequestPart(PLAN_PROMPT, (skeleton,)), RequestPart(POINT_PROMPT, branches)


def _concurrency_rows(undrafted: GpuLoop, tuned: GpuLoop, baseline: Baseline) -> Iterator[Row]:
    """Yield a row for each number of simultaneous requests in REQUESTS. The tuner decides how much is
    drafted; then drafting is paused, which should cost no more than decoding without a drafter.

    undrafted: The loop without drafts.
    tuned: The loop with a tuner.
    baseline: What results are compared with, after its speed and its context have been replaced by those of
        as many sequences without drafts.

    "x plain" in a row is relative to as many sequences without drafts at once.
    """
    for requests in REQUESTS:
        undrafted_clock = undrafted.run(REQUEST_CONTEXT, requests, REQUEST_STEPS)
        own_baseline = replace(
            baseline, context_length=REQUEST_CONTEXT * requests, tokens_per_second=speed_of(undrafted_clock)
        )
        clock = tuned.run(REQUEST_CONTEXT, requests, REQUEST_STEPS)
        yield figures_of("requests at once", clock, own_baseline, requests) | {"requests": requests}
        clock = tuned.run(REQUEST_CONTEXT, requests, REQUEST_STEPS, paused=True)
        yield figures_of("requests at once, paused", clock, own_baseline, requests) | {"requests": requests}


def _memory_rows(decoder: Decoder, context_length: int, speeds: Speeds) -> Iterator[Row]:
    """Yield two rows: the bytes of KV of a token with the pages that six branches share, and a step after a
    long context.

    decoder: The whole base model.
    context_length: Number of tokens of the prefix that the branches fork.
    speeds: The measured speeds of the device.

    The first row has the bytes of a token's KV, computed and as allocated, and the pages of a prefix and six
    branches of BRANCH tokens, with sharing and without. Pages are counted by a page table, without a forward
    pass. The second row is a step of one row after LONG tokens, on the device alone.
    """
    kv: KVPages = decoder.make_kv(8, PAGE)
    table = PageTable(PAGES, PAGE)
    table.open(1)
    table.reserve(1, context_length)
    for branch in range(BRANCHES):
        table.fork(2 + branch, 1, context_length)
        table.reserve(2 + branch, context_length + BRANCH)
    yield {
        "what": "KV",
        "bytes a token, computed": bytes_of_kv(decoder.config, 1, decoder.dtype.itemsize),
        "bytes a token, allocated": kv.bytes // (kv.pages * PAGE),
        "pages of six branches": PAGES - table.free,
        "pages if nothing were shared": (BRANCHES + 1) * table.pages_for(context_length)
        + BRANCHES * -(-BRANCH // PAGE),
    }
    seconds = median_seconds(captured(step_call(decoder, LONG, 1)))
    floor = floor_of_step(decoder.config, speeds, 1, LONG)
    yield {
        "what": "plain, device, long text",
        "text": LONG,
        "ms": round(seconds * 1e3, 3),
        "floor ms": round(floor * 1e3, 3),
        "of copy bandwidth %": round(100 * floor / seconds, 1),
    }


def figures_of(way: str, clock: StepClock, baseline: Baseline, num_sequences: int = 1) -> Row:
    """Return the figures of a run as a row.

    way: Name of the way to decode.
    clock: The run, of at least two steps.
    baseline: What the run is compared with.
    num_sequences: Number of simultaneous sequences.
    """
    fastest, slowest = clock.ninety_percent_range
    return {
        "what": f"replayed, {way}",
        "tokens a step and text": round(clock.tokens / clock.steps / num_sequences, 2),
        "ms a step, 5 %": round(fastest * 1e3, 3),
        "ms a step, 95 %": round(slowest * 1e3, 3),
    } | _figures(clock, baseline)


def _figures(clock: StepClock, baseline: Baseline) -> Row:
    """Return figures per step, and relative to decoding without speculation. The entry "x plain at the floor"
    is the speed-up of steps as short as possible.

    clock: The run.
    baseline: What the run is compared with.

    Other entries: "steps" (their number), "rows a step", "ms a step" and the milliseconds of each phase
    ("<phase> ms") and of the shortest possible step ("floor ms"), "tokens/s", and "x plain", the tokens per
    second relative to decoding without speculation.
    """
    floor = baseline.floor(clock)
    gain = speed_of(clock) / baseline.tokens_per_second
    return {
        "steps": clock.steps,
        "rows a step": round(sum(clock.step_rows) / clock.steps, 1),
        "ms a step": _milliseconds_per_step(clock.total_seconds, clock),
        **{f"{what} ms": _milliseconds_per_step(seconds, clock) for what, seconds in _phases(clock).items()},
        "floor ms": _milliseconds_per_step(floor, clock),
        "tokens/s": round(speed_of(clock), 1),
        "x plain": round(gain, 3),
        "x plain at the floor": round(gain * clock.total_seconds / floor, 2),
    }


def _phases(clock: StepClock) -> dict[str, float]:
    """Return the seconds by phase. Layers and lm_head, which follow each other on the device, are one phase,
    "verify".

    clock: The run.

    The keys are "compose", "verify", and those of the drafter's phases if the run drafted. Raises KeyError if
    the run has no steps.
    """
    spent = dict(clock.seconds)
    verify = {"compose": spent.pop("compose"), "verify": spent.pop("layers") + spent.pop("lm_head")}
    return verify | spent


def speed_of(clock: StepClock) -> float:
    """Return the tokens per second of a run, of all sequences together.

    clock: The run.
    """
    return clock.tokens / clock.total_seconds


def _milliseconds_per_step(seconds: float, clock: StepClock) -> float:
    """Return seconds of a whole run as milliseconds per step, rounded to microseconds.

    seconds: Seconds of all steps.
    clock: The run.
    """
    return round(1e3 * seconds / clock.steps, 3)
