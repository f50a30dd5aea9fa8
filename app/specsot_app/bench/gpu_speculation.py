"""What speculation and branches bring on one GPU, with acceptance as published and costs as measured.

Refuses to know how acceptance is replayed: see `gpu_replay`. Everything is wall time of whole laps, results
read by the host, against plain decoding by the same stage without taps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specsot.members import Curve, Range, TreeShape
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages
from specsot.model.measure import measure_rows
from specsot.pages import PageTable
from specsot_app.bench.gpu_drafts import head_shape, made_up_head
from specsot_app.bench.gpu_laps import lap_of, replayed
from specsot_app.bench.gpu_replay import PAGE, Clock, Drafting, Ring, Telling, rates_of
from specsot_app.bench.shapes import bytes_of_a_token, bytes_of_kv, config_of
from specsot_drafter.measure import measure_levels

Row = dict[str, object]

TAU = 6.13  # tokens a lap: EAGLE-3 on Llama-3.1-8B-Instruct, MT-bench, temperature 0, as published
DEPTH, TOP_K, NODES = 7, 10, 60  # of the published tree
BRANCHES, BUDGET = 6, 198  # rows that the branches of one request share
LAPS = 200
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
REQUEST_TEXT, REQUEST_LAPS = 256, 120
SKELETON, BRANCH = 150, 150  # tokens of the request that is told as a whole
PAGES = 1600
LONG = 32_768


@torch.inference_mode()
def measure_speculation(name: str, text: int, bandwidth: float) -> Iterator[Row]:
    config = config_of(name)
    decoder = Decoder(config, Telling(), Range(0, config.layers), torch.bfloat16, torch.device("cuda", 0))
    head = made_up_head(decoder, head_shape(config))
    shape = TreeShape(DEPTH, TOP_K, NODES, fixed=True)
    plain = Ring(decoder, PAGES, 512, None)
    drafted = Ring(decoder, PAGES, 512, Drafting(head, shape, rates_of(TAU, DEPTH + 1)))
    yield from _ablation(plain, drafted, text)
    del drafted
    yield from _short(decoder, plain, shape, text)
    lap: Curve = tuple((rows, one * config.layers) for rows, one in measure_rows(decoder))
    tuned = TreeShape(DEPTH, TOP_K, NODES)
    drafting = Drafting(head, tuned, rates_of(TAU, DEPTH + 1), lap, measure_levels(head))
    yield from _requests(plain, Ring(decoder, PAGES, 512, drafting))
    yield from _memory(decoder, text, bandwidth)


def _ablation(plain: Ring, drafted: Ring, text: int) -> Iterator[Row]:
    """One text and six branches, each with drafts and without."""
    one = plain.run(text, 1, LAPS)
    nodes = BUDGET // BRANCHES
    ways = {
        "plain": one,
        "eagle": drafted.run(text, 1, LAPS),
        "sot": plain.run(text, BRANCHES, LAPS, forked=True),
        "both": drafted.run(text, BRANCHES, LAPS, forked=True, nodes=nodes),
    }
    for way, clock in ways.items():
        yield {"what": f"replayed, {way}"} | _told(clock, one, 1 if way in ("plain", "eagle") else BRANCHES)
    speed = {way: clock.tokens / clock.whole for way, clock in ways.items()}
    whole = (SKELETON + BRANCHES * BRANCH) / speed["plain"]
    parts = SKELETON / speed["eagle"] + BRANCHES * BRANCH / speed["both"]
    yield {
        "what": "replayed, whole request of equal branches, put together from its phases",
        "skeleton": SKELETON,
        "branches": f"{BRANCHES} x {BRANCH}",
        "x plain": round(whole / parts, 2),
    }


def _short(decoder: Decoder, plain: Ring, shape: TreeShape, text: int) -> Iterator[Row]:
    """The same with a head in 8-bit floats, as often right as the other."""
    head = made_up_head(decoder, head_shape(decoder.config), "fp8")
    drafted = Ring(decoder, PAGES, 512, Drafting(head, shape, rates_of(TAU, DEPTH + 1)))
    one = plain.run(text, 1, LAPS)
    yield {"what": "replayed, eagle, fp8 head"} | _told(drafted.run(text, 1, LAPS), one, 1)
    both = drafted.run(text, BRANCHES, LAPS, forked=True, nodes=BUDGET // BRANCHES)
    yield {"what": "replayed, both, fp8 head"} | _told(both, one, BRANCHES)


def _requests(plain: Ring, tuned: Ring) -> Iterator[Row]:
    """More and more requests at once; the tuner decides how much is drafted."""
    for requests in REQUESTS:
        one = plain.run(REQUEST_TEXT, requests, REQUEST_LAPS)
        clock = tuned.run(REQUEST_TEXT, requests, REQUEST_LAPS)
        yield {"what": "replayed, requests at once", "requests": requests} | _told(clock, one, requests)


def _memory(decoder: Decoder, text: int, bandwidth: float) -> Iterator[Row]:
    """Bytes of a token, pages that branches share, a lap behind a long text."""
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
    seconds = replayed(lap_of(decoder, LONG, 1))
    needed = bytes_of_a_token(decoder.config, 2) + bytes_of_kv(decoder.config, LONG, 2)
    yield {
        "what": "plain, device, long text",
        "text": LONG,
        "ms": round(seconds * 1e3, 3),
        "of copy bandwidth %": round(100 * needed / bandwidth / seconds, 1),
    }


def _told(clock: Clock, plain: Clock, texts: int) -> Row:
    speed, before = clock.tokens / clock.whole, plain.tokens / plain.whole
    return {
        "tokens a lap and text": round(clock.tokens / clock.laps / texts, 2),
        "rows a lap": round(clock.rows / clock.laps, 1),
        "ms a lap": _ms(clock.whole, clock),
        **{f"{what} ms": _ms(seconds, clock) for what, seconds in clock.seconds.items()},
        "tokens/s": round(speed, 1),
        "x plain": round(speed / before, 3),
    }


def _ms(seconds: float, clock: Clock) -> float:
    return round(1e3 * seconds / clock.laps, 3)
