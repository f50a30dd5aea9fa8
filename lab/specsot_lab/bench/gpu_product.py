"""Measures what the product does and the other rows leave out: its own defaults, grammars, sampling, prompts.

Acceptance is replayed by node rank here, unless a row says "tau told": then with one chance for each level,
see `gpu_replay`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Final

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
    UNCONSTRAINED,
    Constraint,
    Drafting,
    GpuLoop,
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
    NODES,
    PAGES,
    PLAN_PROMPT,
    POINT_PROMPT,
    REQUEST_CONTEXT,
    REQUEST_STEPS,
    ROWS,
    SKELETON,
    STEPS,
    TAU,
    TIMES,
    TOP_K,
    WARM_TOKENS,
    Baseline,
    Row,
    figures_of,
    speed_of,
)
from specsot_lab.bench.gpu_steps import Speeds
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

# Tokens of the prompts that are timed.
PROMPTS: Final = (1024, 8192, 32768)
# Page sizes in rows. The first is measured once more, to show how much two equal runs differ.
PAGE_ROWS: Final = (64, 128, 256, 64)
# The temperature of sampled runs. Untuned.
TEMPERATURE: Final = 0.7
# Sequences at once, of which one is constrained to a form.
SIMULTANEOUS: Final = 8
# The form: a list of strings in JSON.
FORM: Final = Form("json_schema", ('{"type": "array", "items": {"type": "string"}}',))
# The rules of a plan that must not be a direct answer.
RULES: Final = PlanRules(direct=False)
# Words that made-up tokens and titles consist of.
WORDS: Final = (
    "growth",
    "market",
    "people",
    "water",
    "policy",
    "simple",
    "first",
    "energy",
    "local",
    "method",
)


def measure_product(decoder: Decoder, context_length: int, speeds: Speeds) -> Iterator[Row]:
    """Yield the rows of everything that the product does in addition to drafting: prompts, page sizes, trees,
    temperature, grammars.

    decoder: The whole base model, with weights that predict the next higher token id, see `NextTokenWeights`.
    context_length: Number of tokens in the KV cache before what is measured.
    speeds: The measured speeds of the device.

    The rows come in this order: prompts, page sizes, trees, sampling, grammars.
    """
    yield from measure_prompts(decoder)
    head = made_up_head(decoder, head_shape(decoder.config))
    ranks = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)
    speed = speed_of(GpuLoop(decoder, PAGES, ROWS, None).run(context_length, 1, STEPS))
    baseline = Baseline(decoder, speeds, context_length, speed)
    yield from measure_pages(decoder, head, context_length, baseline)
    yield from measure_trees(decoder, head, baseline)
    yield from measure_chance(decoder, head, ranks, baseline)
    yield from measure_grammar(decoder, head, ranks, baseline)


def measure_prompts(decoder: Decoder, rows: int = ROWS) -> Iterator[Row]:
    """Yield the time from a prompt to its first token, for each length in PROMPTS.

    decoder: The whole base model.
    rows: Maximum number of rows of other frames, from which the stage derives that of a prompt's frames.

    A row has the median ("ms"), the shortest ("least ms") and the longest ("most ms") milliseconds, and
    tokens per second by the median.
    """
    for context_length in PROMPTS:
        seconds = prompt_seconds(decoder, context_length, rows)
        median = statistics.median(seconds)
        yield {
            "what": "prefill",
            "rows": context_length,
            "ms": round(1e3 * median, 2),
            "least ms": round(1e3 * min(seconds), 2),
            "most ms": round(1e3 * max(seconds), 2),
            "tokens/s": round(context_length / median),
        }


def prompt_seconds(decoder: Decoder, context_length: int, rows: int, repetitions: int = 5) -> list[float]:
    """Return the seconds from each prompt to its first token. One more prompt before them is not counted.

    decoder: The whole base model.
    context_length: Tokens of each prompt, at least 1.
    rows: Maximum number of rows of other frames, from which the stage derives that of a prompt's frames.
    repetitions: Number of prompts.

    The prompt is read in chunks, as many rows as the stage takes at once. Each sequence is closed after its
    first token, which is not timed.
    """
    stage = DecoderStage(decoder, context_length // PAGE + 2, PAGE)
    seconds = list[float]()
    chunk_rows = stage.prompt_rows(rows)
    verifier = Verifier(decoder.logits, lambda _: None)
    stage.capture()
    for number in range(1, repetitions + 2):
        opening = (Opening(number, context_length, limit=4, drafted=False),)
        watch = Stopwatch()
        for start in range(0, context_length, chunk_rows):
            tokens = tuple(range(start, min(start + chunk_rows, context_length)))
            chunk = PromptChunk(number, start, tokens, start + chunk_rows >= context_length)
            verified = verifier.verify(stage.run(Frame(1, number, opening, (chunk,))))
            opening = ()
        assert verified.result.outcomes[0].tokens  # pyrefly: ignore[unbound-name]
        seconds.append(watch.seconds)
        verifier.verify(stage.run(Frame(1, number, (), (), (number,))))
    return seconds[1:]


def measure_pages(
    decoder: Decoder, head: DraftHead, context_length: int, baseline: Baseline
) -> Iterator[Row]:
    """Yield the rows of each page size: without drafts, and with a tree whose acceptance is replayed with one
    chance for each level.

    decoder: The whole base model.
    head: The head, which runs for its cost.
    context_length: Number of tokens in the KV cache before what is measured.
    baseline: What results are compared with.

    For each page size there is one row without drafts, one of SIMULTANEOUS sequences without drafts, and one
    with drafts. The entry "rows" is the page size in rows.
    """
    tree = Drafting(head, TreeShape(DEPTH, TOP_K, NODES, fixed=True), CHANCE, BUDGET)
    for page in PAGE_ROWS:
        for way, drafting in (("plain", None), ("eagle, tau told", tree)):
            loop = GpuLoop(decoder, PAGES, ROWS, drafting, WritingOptions(page))
            yield figures_of(f"{way}, page rows", loop.run(context_length, 1, STEPS), baseline) | {
                "rows": page
            }
            if drafting is None:
                clock = loop.run(REQUEST_CONTEXT, SIMULTANEOUS, STEPS // 2)
                yield figures_of("8 plain, page rows", clock, baseline, SIMULTANEOUS) | {"rows": page}


def measure_trees(decoder: Decoder, head: DraftHead, baseline: Baseline) -> Iterator[Row]:
    """Yield the rows of the default tree with its tuner, and of larger and fixed trees, each for one sequence
    and for six branches.

    decoder: The whole base model.
    head: The head, which runs for its cost.
    baseline: What results are compared with, and the context that is measured.

    The time of steps and of levels is measured first, for the tuner. Fixed shapes are not tuned.
    """
    curve: Curve = tuple((rows, seconds * decoder.config.layers) for rows, seconds in measure_rows(decoder))
    shapes = {
        "defaults": TreeShape(),
        "defaults, 60 nodes of depth 7": TreeShape(DEPTH, TOP_K, NODES),
        "always 60 nodes": TreeShape(DEPTH, TOP_K, NODES, fixed=True),
        "always 24 nodes": TreeShape(DEPTH, TOP_K, 24, fixed=True),
    }
    levels = measure_levels(head)
    for name, shape in shapes.items():
        chances = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)[: shape.top_k]
        drafting = Drafting(head, shape, chances, ROWS if not shape.fixed else BUDGET, curve, levels)
        loop = GpuLoop(decoder, PAGES, ROWS, drafting)
        yield figures_of(f"{name}", loop.run(baseline.context_length, 1, STEPS), baseline)
        clock = loop.run(baseline.context_length, BRANCHES, STEPS, forked=True)
        yield figures_of(f"{name}, six branches", clock, baseline, BRANCHES)


def measure_chance(decoder: Decoder, head: DraftHead, ranks: Ranks, baseline: Baseline) -> Iterator[Row]:
    """Yield the rows of the same sequence at a temperature and greedily, in turns (A, B, B, A), with and
    without drafts.

    decoder: The whole base model.
    head: The head, which runs for its cost.
    ranks: Probability that each rank of a node's children is right.
    baseline: What results are compared with, and the context that is measured.

    There are eight rows, four without drafts and four with.
    """
    sampled = WritingOptions(sampling=Sampling(temperature=TEMPERATURE))
    tree = Drafting(head, TreeShape(DEPTH, TOP_K, NODES, fixed=True), ranks, BUDGET)
    for name, drafting in (("plain", None), ("eagle", tree)):
        loop = GpuLoop(decoder, PAGES, ROWS, drafting)
        for writing in (UNCONSTRAINED, sampled, sampled, UNCONSTRAINED):
            loop.writing = writing
            label = f"{name}, T = {writing.sampling.temperature:g}"
            yield figures_of(label, loop.run(baseline.context_length, 1, STEPS), baseline)


def measure_grammar(decoder: Decoder, head: DraftHead, ranks: Ranks, baseline: Baseline) -> Iterator[Row]:
    """Yield the rows of a plan that is constrained by its grammar, and of what one constrained sequence costs
    those alongside, each in turns with unconstrained runs.

    decoder: The whole base model, with weights that predict the next higher token id.
    head: The head, which runs for its cost.
    ranks: Probability that each rank of a node's children is right.
    baseline: What results are compared with, and the context that is measured.

    First come four rows of a plan and four of a whole request, each "free", "held", "held", "free"; "held"
    means constrained. Then come four rows of SIMULTANEOUS sequences, of which none, one, one and none is
    constrained to a form.
    """
    tree = Drafting(head, TreeShape(DEPTH, TOP_K, NODES, fixed=True), ranks, BUDGET)
    loop = GpuLoop(decoder, PAGES, ROWS, tree)
    size = decoder.config.vocab
    plan = WritingOptions(
        constraint=Constraint(vocabulary_with(size, PLAN_PROMPT + 1, plan_pieces()), plan=RULES)
    )
    pieces = islice(list_pieces(), 4000)
    form = WritingOptions(
        constraint=Constraint(vocabulary_with(size, REQUEST_CONTEXT + 1, pieces), form=FORM)
    )
    turns = (("free", UNCONSTRAINED), ("held", plan), ("held", plan), ("free", UNCONSTRAINED))
    for phase in (_plan_row, _request_row):
        for name, loop.writing in turns:
            yield phase(loop, name, baseline)
    for name, loop.writing in (
        ("none", UNCONSTRAINED),
        ("one", form),
        ("one", form),
        ("none", UNCONSTRAINED),
    ):
        clock = loop.run(REQUEST_CONTEXT, SIMULTANEOUS, REQUEST_STEPS)
        own_baseline = replace(baseline, context_length=REQUEST_CONTEXT * SIMULTANEOUS)
        yield figures_of(f"8 texts, {name} held to a form", clock, own_baseline, SIMULTANEOUS)


def _plan_row(loop: GpuLoop, name: str, baseline: Baseline) -> Row:
    """Return the row of a plan that is written TIMES times.

    loop: The loop that writes the plan.
    name: "held" if the plan is constrained by its grammar, else "free".
    baseline: What results are compared with, and the context that is measured.

    A shorter plan of WARM_TOKENS tokens, written before, is not counted.
    """
    part = RequestPart(PLAN_PROMPT, (SKELETON,), constrained=name == "held")
    loop.write(
        baseline.context_length, (RequestPart(PLAN_PROMPT, (WARM_TOKENS,), constrained=name == "held"),)
    )
    clocks = [loop.write(baseline.context_length, (part,)) for _ in range(TIMES)]
    return _median_row(f"a plan, {name}", clocks, baseline)


def _request_row(loop: GpuLoop, name: str, baseline: Baseline) -> Row:
    """Return the row of a whole request, a plan and then its branches, that is written TIMES times.

    loop: The loop that writes the request.
    name: "held" if the plan is constrained by its grammar, else "free".
    baseline: What results are compared with, and the context that is measured.

    Only the plan is constrained, never the branches. A request with branches of WARM_TOKENS tokens, written
    before, is not counted.
    """
    plan = RequestPart(PLAN_PROMPT, (SKELETON,), constrained=name == "held")
    parts = plan, RequestPart(POINT_PROMPT, (BRANCH,) * BRANCHES)
    loop.write(baseline.context_length, (plan, RequestPart(POINT_PROMPT, (WARM_TOKENS,) * BRANCHES)))
    return _median_row(
        f"whole request, {name}", [loop.write(baseline.context_length, parts) for _ in range(TIMES)], baseline
    )


def _median_row(name: str, clocks: Sequence[StepClock], baseline: Baseline) -> Row:
    """Return the row of several runs: the figures of the median run, with the shortest and the longest
    milliseconds.

    name: The row's name.
    clocks: The runs, at least one.
    baseline: What results are compared with.

    The entries "ms", "ms, least" and "ms, most" are whole runs; "tokens" is the number of tokens of the
    median run.
    """
    seconds = sorted(clock.total_seconds for clock in clocks)
    clock = min(clocks, key=lambda clock: abs(clock.total_seconds - seconds[len(seconds) // 2]))
    return figures_of(name, clock, baseline) | {
        "ms": round(1e3 * clock.total_seconds, 1),
        "ms, least": round(1e3 * seconds[0], 1),
        "ms, most": round(1e3 * seconds[-1], 1),
        "tokens": clock.tokens,
    }


def vocabulary_with(size: int, first_token: int, pieces: Iterator[bytes] | Sequence[bytes]) -> Vocabulary:
    """Return a vocabulary in which successive tokens have the given pieces, so that a model which predicts
    the next higher token id writes them. All other tokens are the 256 single bytes, then made-up words.
    Pieces after the last token are dropped. For example:

        # size 300, first token 270, pieces [a, b] -> token 270 is a, token 271 is b, token 65 is the byte "A"

    size: Number of tokens.
    first_token: The token that has the first piece.
    pieces: The bytes of successive tokens.

    A size below 256 has only that many single bytes. Pieces replace the tokens that would be at their ids.
    """
    words = (f" {a}{b}{n}".encode() for n in count() for a in WORDS for b in WORDS)
    tokens = [bytes([byte]) for byte in range(256)][:size]
    tokens += islice(words, size - len(tokens))
    for token, piece in enumerate(pieces, first_token):
        if token < size:
            tokens[token] = piece
    return describe(tokens)


def plan_pieces() -> list[bytes]:
    """Return the text of a plan of six points, as the bytes of its words and marks in order, about SKELETON
    pieces. A word includes the space before it. The plan is the same every time.
    """
    titles = (" ".join(islice(cycle(WORDS[n:] + WORDS[:n]), 11)) for n in range(BRANCHES))
    lines = (f"{n}.<{BRANCH}><None>[-]{title}\n" for n, title in enumerate(titles, 1))
    return [piece.encode() for piece in re.findall(r" ?\w+|\W", "[PLAN]\n" + "".join(lines) + "[END]")]


def list_pieces() -> Iterator[bytes]:
    """Yield, without end, the pieces of a list of strings in JSON.

    The list is never closed, so that a model can follow it for any length.
    """
    yield b"["
    for number in count():
        yield from (b'"', *(f" {word}".encode() for word in WORDS[number % 7 :]), b'",', b" ")
