"""What speculation and branches bring on one GPU, with acceptance as published and costs as measured.

See `gpu_replay`. Everything is wall time of whole steps, results
read by the host, against plain decoding by the same stage without taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specsot.core.pages import PageTable
from specsot.members import Curve, TreeShape
from specsot_drafter.heads import DraftHead
from specsot_drafter.loader import measure_levels
from specsot_lab.bench.acceptance import chance_of
from specsot_lab.bench.clock import StepClock, captured, typical
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import PAGE, Drafting, GpuLoop, RequestPart
from specsot_lab.bench.gpu_replay import scaled_ranks
from specsot_lab.bench.gpu_steps import BYTES, Speeds, floor_of_draft, floor_of_step, step_of
from specsot_lab.bench.synthetic_models import bytes_of_kv
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages

# Tokens behind the request's own, to plan and to write one of six points whose titles have five words: what
# general instruct models are told, in English, by the demo model's tokenizer.
PLAN_PROMPT = 221
POINT_PROMPT = 94

# Tokens of each point of a plan that the demo model wrote before it was trained further, none of them cut, as
# branch_finished told behind specsot infer --json --mode sot --drafter none "Outline the topic of Business
# Structures and explain each point.": the only one of 29 plans that had six points.
PLANS = ((34, 22, 18, 14, 22, 12),)


def scaled(lengths: Sequence[int], whole: int) -> tuple[int, ...]:
    """Return lengths in the same proportions that sum to `whole`: ((1, 3), 8) -> (2, 6)."""
    ends = [round(whole * sum(lengths[: place + 1]) / sum(lengths)) for place in range(len(lengths))]
    return tuple(end - before for before, end in zip((0, *ends), ends))


Row = dict[str, object]

TAU = 6.13  # tokens a step: EAGLE-3 on Llama-3.1-8B-Instruct, MT-bench, temperature 0, as published
# of the published tree
DEPTH = 7
TOP_K = 10
NODES = 60
CHANCE = chance_of(TAU, DEPTH + 1)
# rows that the branches of one request share
BRANCHES = 6
BUDGET = 198
STEPS = 150
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
REQUEST_TEXT = 256
REQUEST_STEPS = 100
# tokens of a whole request, of its branches on average
SKELETON = 150
BRANCH = 150
# that a whole request is written; tokens of one that is not told
TIMES = 3
FEW = 8
ROWS = 512
PAGES = 1600
LONG = 32_768


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What speculation is held against: tokens a second of plain decoding, and what steps take at least.

    text: rows that all see. drafts: seconds of a draft at least.
    """

    decoder: Decoder
    speeds: Speeds
    text: int
    plain: float
    drafts: float = 0.0

    def floor(self, clock: StepClock) -> float:
        """Seconds of a whole run at least."""
        config = self.decoder.config
        speeds = self.speeds
        return sum(floor_of_step(config, speeds, rows, self.text) + self.drafts for rows in clock.rows)


def measure_speculation(decoder: Decoder, text: int, speeds: Speeds) -> Iterator[Row]:
    """Yield rows of drafting and branches. decoder: with weights that tell the next token. text: rows before.
    speeds: of the device.
    """
    head = made_up_head(decoder, head_shape(decoder.config))
    shape = TreeShape(DEPTH, TOP_K, NODES, fixed=True)
    plain = GpuLoop(decoder, PAGES, ROWS, None)
    one = plain.run(text, 1, STEPS)
    held = Yardstick(decoder, speeds, text, speed_of(one))
    yield figures_of("plain", one, held)
    yield figures_of("sot", plain.run(text, BRANCHES, STEPS, forked=True), held, BRANCHES)
    yield from _whole("sot", plain, held)
    yield from _drafted(decoder, head, shape, held)
    short = made_up_head(decoder, head_shape(decoder.config), "fp8")
    yield from _drafted(decoder, short, shape, held, ", fp8 head", 1)
    step: Curve = tuple((rows, one * decoder.config.layers) for rows, one in measure_rows(decoder))
    tuned = TreeShape(DEPTH, TOP_K, NODES)
    ranks = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)  # a tuner believes a head that says how sure it is
    drafting = Drafting(head, tuned, ranks, ROWS, step, measure_levels(head))
    yield from _requests(plain, GpuLoop(decoder, PAGES, ROWS, drafting), held)
    yield from _memory(decoder, text, speeds)


def _drafted(
    decoder: Decoder,
    head: DraftHead,
    shape: TreeShape,
    held: Yardstick,
    said: str = "",
    bytes_each: int = BYTES,
) -> Iterator[Row]:
    """Yield rows of one sequence, six branches and whole requests; a head in 8-bit floats is as often right
    as the other. said: is appended to names. bytes_each: of a weight of the head.
    """
    ring = GpuLoop(decoder, PAGES, ROWS, Drafting(head, shape, CHANCE, BUDGET))
    drafts = floor_of_draft(head_shape(decoder.config), held.speeds, DEPTH + 1, bytes_each)
    held = replace(held, drafts=drafts)
    yield figures_of(f"eagle{said}", ring.run(held.text, 1, STEPS), held)
    yield figures_of(f"both{said}", ring.run(held.text, BRANCHES, STEPS, forked=True), held, BRANCHES)
    yield from _whole(f"both{said}", ring, held)


def _whole(way: str, ring: GpuLoop, held: Yardstick) -> Iterator[Row]:
    """A skeleton and its branches until the last has ended, against plain decoding of as many tokens.

    Prompts of the plan and the points are in it; plain decoding has none but the text's.
    """
    ring.write(held.text, _parts(FEW, (FEW,) * BRANCHES))  # whatever is compiled for prompts is so now
    for lengths in (BRANCH,) * BRANCHES, *(scaled(plan, BRANCHES * BRANCH) for plan in PLANS):
        written = [ring.write(held.text, _parts(SKELETON, lengths)) for _ in range(TIMES)]
        clocks = sorted(written, key=lambda clock: clock.whole)
        gains = [round(speed_of(each) / held.plain, 2) for each in clocks]
        clock = clocks[TIMES // 2]
        bare = (clock.tokens - clock.first) / (clock.whole - clock.fed)
        yield {
            "what": f"replayed, whole request, {way}",
            "branches": " ".join(map(str, lengths)),
            "skeleton": SKELETON,
            "ms": round(clock.whole * 1e3, 1),
            "of them with prompts ms": round(clock.fed * 1e3, 1),
            **_figures(clock, held),
            "x plain, least": gains[-1],
            "x plain, most": gains[0],
            "x plain without steps with prompts": round(bare / held.plain, 2),
        }


def _parts(skeleton: int, branches: Sequence[int]) -> tuple[RequestPart, RequestPart]:
    """Return the parts of a request. skeleton: tokens of the plan. branches: tokens of each branch."""
    return RequestPart(PLAN_PROMPT, (skeleton,)), RequestPart(POINT_PROMPT, branches)


def _requests(plain: GpuLoop, tuned: GpuLoop, held: Yardstick) -> Iterator[Row]:
    """Yield rows of more and more requests at once: the policy decides how much is drafted, then drafting is
    paused, which is to cost no more than decoding without a drafter.

    plain: without a drafter.
    tuned: with a drafter.
    held: what both are compared with.
    """
    for requests in REQUESTS:
        one = plain.run(REQUEST_TEXT, requests, REQUEST_STEPS)
        beside = replace(held, text=REQUEST_TEXT * requests, plain=speed_of(one))
        clock = tuned.run(REQUEST_TEXT, requests, REQUEST_STEPS)
        yield figures_of("requests at once", clock, beside, requests) | {"requests": requests}
        clock = tuned.run(REQUEST_TEXT, requests, REQUEST_STEPS, paused=True)
        yield figures_of("requests at once, paused", clock, beside, requests) | {"requests": requests}


def _memory(decoder: Decoder, text: int, speeds: Speeds) -> Iterator[Row]:
    """Bytes of a token, pages that branches share, a step behind a long text."""
    kv: KVPages = decoder.make_kv(8, PAGE)
    table = PageTable(PAGES, PAGE)
    table.open(1)
    table.reserve(1, text)
    for branch in range(BRANCHES):
        table.fork(2 + branch, 1, text)
        table.reserve(2 + branch, text + BRANCH)
    yield {
        "what": "KV",
        "bytes a token, computed": bytes_of_kv(decoder.config, 1, decoder.dtype.itemsize),
        "bytes a token, allocated": kv.bytes // (kv.pages * PAGE),
        "pages of six branches": PAGES - table.free,
        "pages if nothing were shared": (BRANCHES + 1) * table.pages_for(text)
        + BRANCHES * -(-BRANCH // PAGE),
    }
    seconds = typical(captured(step_of(decoder, LONG, 1)))
    floor = floor_of_step(decoder.config, speeds, 1, LONG)
    yield {
        "what": "plain, device, long text",
        "text": LONG,
        "ms": round(seconds * 1e3, 3),
        "floor ms": round(floor * 1e3, 3),
        "of copy bandwidth %": round(100 * floor / seconds, 1),
    }


def figures_of(way: str, clock: StepClock, held: Yardstick, texts: int = 1) -> Row:
    """Return the figures of a run as a row. way: its name. texts: sequences side by side."""
    least, most = clock.spread
    return {
        "what": f"replayed, {way}",
        "tokens a step and text": round(clock.tokens / clock.steps / texts, 2),
        "ms a step, 5 %": round(least * 1e3, 3),
        "ms a step, 95 %": round(most * 1e3, 3),
    } | _figures(clock, held)


def _figures(clock: StepClock, held: Yardstick) -> Row:
    """Return figures per step, and against decoding without drafts; the floor's speed-up is that of steps as
    short as they can be.
    """
    floor = held.floor(clock)
    gain = speed_of(clock) / held.plain
    return {
        "steps": clock.steps,
        "rows a step": round(sum(clock.rows) / clock.steps, 1),
        "ms a step": _ms(clock.whole, clock),
        **{f"{what} ms": _ms(seconds, clock) for what, seconds in _phases(clock).items()},
        "floor ms": _ms(floor, clock),
        "tokens/s": round(speed_of(clock), 1),
        "x plain": round(gain, 3),
        "x plain at the floor": round(gain * clock.whole / floor, 2),
    }


def _phases(clock: StepClock) -> dict[str, float]:
    """Return the seconds by phase; layers and lm_head, which follow each other on the device, as one."""
    spent = dict(clock.seconds)
    verify = {"compose": spent.pop("compose"), "verify": spent.pop("layers") + spent.pop("lm_head")}
    return verify | spent


def speed_of(clock: StepClock) -> float:
    """Return the tokens a second of a run."""
    return clock.tokens / clock.whole


def _ms(seconds: float, clock: StepClock) -> float:
    """Return seconds of a run as milliseconds per step, rounded."""
    return round(1e3 * seconds / clock.steps, 3)
