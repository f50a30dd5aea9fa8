"""What the product does and the other rows leave out: its own defaults, grammars, chance, prompts.

Acceptance is replayed *by node
rank* here, unless a row says *tau told*.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle, islice

from specsot.core.frames import Frame, Opening, PromptChunk
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary, describe
from specsot.members import Curve, TreeShape
from specsot.params import Form, Sampling
from specsot_bench.results import Stopwatch
from specsot_drafter.heads import DraftHead
from specsot_drafter.loader import measure_levels
from specsot_lab.bench.clock import StepClock
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import (
    PAGE,
    PLAINLY,
    Drafting,
    GpuLoop,
    HeldSequence,
    RequestPart,
    WritingOptions,
)
from specsot_lab.bench.gpu_replay import Ranks, scaled_ranks
from specsot_lab.bench.gpu_speculation import (
    BRANCH,
    BRANCHES,
    BUDGET,
    CHANCE,
    DEPTH,
    FEW,
    NODES,
    PAGES,
    PLAN_PROMPT,
    POINT_PROMPT,
    REQUEST_STEPS,
    REQUEST_TEXT,
    ROWS,
    SKELETON,
    STEPS,
    TAU,
    TIMES,
    TOP_K,
    Row,
    Yardstick,
    figures_of,
    speed_of,
)
from specsot_lab.bench.gpu_steps import Speeds
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

PROMPTS = (1024, 8192, 32768)
PAGE_ROWS = (64, 128, 256, 64)  # the first once more: what two runs of the same differ by
WARMTH = 0.7
COMPANY = 8  # texts, of which one is held to a form
FORM = Form("json_schema", ('{"type": "array", "items": {"type": "string"}}',))
RULES = PlanRules(direct=False)
WORDS = ("growth", "market", "people", "water", "policy", "simple", "first", "energy", "local", "method")


def measure_product(decoder: Decoder, text: int, speeds: Speeds) -> Iterator[Row]:
    """Yield rows of everything that the product does in addition to drafting: prompts, page sizes, trees,
    temperature, grammars.

    decoder: with weights that tell the next token. text: rows before. speeds: of the device.
    """
    yield from measure_prompts(decoder)
    head = made_up_head(decoder, head_shape(decoder.config))
    ranks = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)
    speed = speed_of(GpuLoop(decoder, PAGES, ROWS, None).run(text, 1, STEPS))
    held = Yardstick(decoder, speeds, text, speed)
    yield from measure_pages(decoder, head, text, held)
    yield from measure_trees(decoder, head, ranks, held)
    yield from measure_chance(decoder, head, ranks, held)
    yield from measure_grammar(decoder, head, ranks, held)


def measure_prompts(decoder: Decoder, rows: int = ROWS) -> Iterator[Row]:
    """Yield the time from a prompt to its first token, for each of PROMPTS tokens.

    decoder: the whole base. rows: of other frames, from which the rows of a prompt's frame follow as in the
        product.
    """
    for text in PROMPTS:
        seconds = prompt_seconds(decoder, text, rows)
        middle = statistics.median(seconds)
        yield {
            "what": "prefill",
            "rows": text,
            "ms": round(1e3 * middle, 2),
            "least ms": round(1e3 * min(seconds), 2),
            "most ms": round(1e3 * max(seconds), 2),
            "tokens/s": round(text / middle),
        }


def prompt_seconds(decoder: Decoder, text: int, rows: int, times: int = 5) -> list[float]:
    """Return the seconds of each of `times` prompts of `text` tokens; one more before them does not count.
    rows: of other frames.
    """
    stage = DecoderStage(decoder, text // PAGE + 2, PAGE)
    seconds = list[float]()
    frame = stage.prompt_rows(rows)
    judge = Verifier(decoder.logits, lambda _: None)
    stage.capture()
    for number in range(1, times + 2):
        opening = (Opening(number, text, limit=4, drafted=False),)
        watch = Stopwatch()
        for start in range(0, text, frame):
            tokens = tuple(range(start, min(start + frame, text)))
            chunk = PromptChunk(number, start, tokens, start + frame >= text)
            verdict = judge.verify(stage.run(Frame(1, number, opening, (chunk,))))
            opening = ()
        assert verdict.result.outcomes[0].tokens  # pyrefly: ignore[unbound-name]
        seconds.append(watch.seconds)
        judge.verify(stage.run(Frame(1, number, (), (), (number,))))
    return seconds[1:]


def measure_pages(decoder: Decoder, head: DraftHead, text: int, held: Yardstick) -> Iterator[Row]:
    """Yield rows by the size of a page: without drafts, and with a tree whose acceptance is told.

    head: drafts. text: rows before. held: what results are compared with.
    """
    tree = Drafting(head, TreeShape(DEPTH, TOP_K, NODES, fixed=True), CHANCE, BUDGET)
    for page in PAGE_ROWS:
        for way, drafting in (("plain", None), ("eagle, tau told", tree)):
            ring = GpuLoop(decoder, PAGES, ROWS, drafting, WritingOptions(page))
            yield figures_of(f"{way}, page rows", ring.run(text, 1, STEPS), held) | {"rows": page}
            if drafting is None:
                clock = ring.run(REQUEST_TEXT, COMPANY, STEPS // 2)
                yield figures_of("8 plain, page rows", clock, held, COMPANY) | {"rows": page}


def measure_trees(decoder: Decoder, head: DraftHead, ranks: Ranks, held: Yardstick) -> Iterator[Row]:
    """Yield rows of the default tree with its tuner, and of larger ones that are worth only what their nodes
    add.

    head: drafts. ranks: not used. held: what results are compared with.
    """
    curve: Curve = tuple((rows, one * decoder.config.layers) for rows, one in measure_rows(decoder))
    shapes = {
        "defaults": TreeShape(),
        "defaults, 60 nodes of depth 7": TreeShape(DEPTH, TOP_K, NODES),
        "always 60 nodes": TreeShape(DEPTH, TOP_K, NODES, fixed=True),
        "always 24 nodes": TreeShape(DEPTH, TOP_K, 24, fixed=True),
    }
    levels = measure_levels(head)
    for name, shape in shapes.items():
        right = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)[: shape.top_k]
        drafting = Drafting(head, shape, right, ROWS if not shape.fixed else BUDGET, curve, levels)
        ring = GpuLoop(decoder, PAGES, ROWS, drafting)
        yield figures_of(f"{name}", ring.run(held.text, 1, STEPS), held)
        clock = ring.run(held.text, BRANCHES, STEPS, forked=True)
        yield figures_of(f"{name}, six branches", clock, held, BRANCHES)


def measure_chance(decoder: Decoder, head: DraftHead, ranks: Ranks, held: Yardstick) -> Iterator[Row]:
    """Yield rows of the same text at a temperature and greedily, in turns. head: drafts. ranks: probability
    of each guess. held: what results are compared with.
    """
    warm = WritingOptions(sampling=Sampling(temperature=WARMTH))
    tree = Drafting(head, TreeShape(DEPTH, TOP_K, NODES, fixed=True), ranks, BUDGET)
    for name, drafting in (("plain", None), ("eagle", tree)):
        ring = GpuLoop(decoder, PAGES, ROWS, drafting)
        for asked in (PLAINLY, warm, warm, PLAINLY):
            ring.asked = asked
            said = f"{name}, T = {asked.sampling.temperature:g}"
            yield figures_of(said, ring.run(held.text, 1, STEPS), held)


def measure_grammar(decoder: Decoder, head: DraftHead, ranks: Ranks, held: Yardstick) -> Iterator[Row]:
    """Yield rows of a plan that is constrained by its grammar, and of what one constrained sequence costs
    those alongside. The arguments are those of `measure_chance`.
    """
    tree = Drafting(head, TreeShape(DEPTH, TOP_K, NODES, fixed=True), ranks, BUDGET)
    ring = GpuLoop(decoder, PAGES, ROWS, tree)
    size = decoder.config.vocab
    plan = WritingOptions(held=HeldSequence(spelling(size, PLAN_PROMPT + 1, plan_pieces()), plan=RULES))
    pieces = islice(list_pieces(), 4000)
    form = WritingOptions(held=HeldSequence(spelling(size, REQUEST_TEXT + 1, pieces), form=FORM))
    turns = (("free", PLAINLY), ("held", plan), ("held", plan), ("free", PLAINLY))
    for phase in (_skeleton, _request):
        for name, ring.asked in turns:
            yield phase(ring, name, held)
    for name, ring.asked in (("none", PLAINLY), ("one", form), ("one", form), ("none", PLAINLY)):
        clock = ring.run(REQUEST_TEXT, COMPANY, REQUEST_STEPS)
        beside = replace(held, text=REQUEST_TEXT * COMPANY)
        yield figures_of(f"8 texts, {name} held to a form", clock, beside, COMPANY)


def _skeleton(ring: GpuLoop, name: str, held: Yardstick) -> Row:
    """Return the row of a plan, constrained if `name` is "held". ring: writes it."""
    part = RequestPart(PLAN_PROMPT, (SKELETON,), held=name == "held")
    ring.write(held.text, (RequestPart(PLAN_PROMPT, (FEW,), held=name == "held"),))
    clocks = [ring.write(held.text, (part,)) for _ in range(TIMES)]
    return _summed(f"a plan, {name}", clocks, held)


def _request(ring: GpuLoop, name: str, held: Yardstick) -> Row:
    """Return the row of a whole request: the plan, constrained if `name` is "held", then its branches."""
    plan = RequestPart(PLAN_PROMPT, (SKELETON,), held=name == "held")
    parts = plan, RequestPart(POINT_PROMPT, (BRANCH,) * BRANCHES)
    ring.write(held.text, (plan, RequestPart(POINT_PROMPT, (FEW,) * BRANCHES)))
    return _summed(f"whole request, {name}", [ring.write(held.text, parts) for _ in range(TIMES)], held)


def _summed(what: str, clocks: Sequence[StepClock], held: Yardstick) -> Row:
    """Return the row of several runs: the figures of the median run, with least and most milliseconds. what:
    its name.
    """
    whole = sorted(clock.whole for clock in clocks)
    clock = min(clocks, key=lambda each: abs(each.whole - whole[len(whole) // 2]))
    return figures_of(what, clock, held) | {
        "ms": round(1e3 * clock.whole, 1),
        "ms, least": round(1e3 * whole[0], 1),
        "ms, most": round(1e3 * whole[-1], 1),
        "tokens": clock.tokens,
    }


def spelling(size: int, first: int, pieces: Iterator[bytes] | Sequence[bytes]) -> Vocabulary:
    """Return a vocabulary of `size` tokens: every byte, then made-up words, but from number `first` on these
    pieces, which are what a model that tells the next token writes.
    """
    words = (f" {a}{b}{n}".encode() for n in count() for a in WORDS for b in WORDS)
    tokens = [bytes([byte]) for byte in range(256)][:size]
    tokens += islice(words, size - len(tokens))
    for place, piece in enumerate(pieces, first):
        if place < size:
            tokens[place] = piece
    return describe(tokens)


def plan_pieces() -> list[bytes]:
    """Return a plan of six points in pieces of a word or a mark each, about SKELETON of them."""
    titles = (" ".join(islice(cycle(WORDS[n:] + WORDS[:n]), 11)) for n in range(BRANCHES))
    lines = (f"{n}.<{BRANCH}><None>[-]{title}\n" for n, title in enumerate(titles, 1))
    return [piece.encode() for piece in re.findall(r" ?\w+|\W", "[PLAN]\n" + "".join(lines) + "[END]")]


def list_pieces() -> Iterator[bytes]:
    """Yield the pieces of a list of texts in JSON that never ends."""
    yield b"["
    for number in count():
        yield from (b'"', *(f" {word}".encode() for word in WORDS[number % 7 :]), b'",', b" ")
