"""Graphs of a range: which one runs, what is padded, and that it is what layers do one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.core.tree import ancestry, depths
from specsot.members import KvDtype, Range
from specsot_kernels.attention_tables import (
    AttentionTables,
    Numbers,
    PieceTables,
    RowSights,
    TableRoom,
    tabulate,
)
from specsot_model.attention import RowSpan, plan_readings, plan_with_kernel
from specsot_model.cuda_graphs import (
    MAX_GRAPH_MOVES,
    MIN_ROWS_WITH_MOVES,
    PROMPT_BUCKETS,
    Captured,
    CapturedSteps,
    GraphCapture,
    StepRows,
    Work,
    bucket_of,
    measure_rows,
    prompt_buckets,
)
from specsot_model.decoder import Decoder
from specsot_model.fused import CapturedBlock, FusedBlock, can_fuse, connect_blocks, head_turns_of
from specsot_model.kv import as_numbers
from tests.conftest import examples, some
from tests.model.tiny import GROWING, write_model
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.attention import plan_attention

PAGE = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KIND = torch.float16  # what no library packs on a CPU


def later(work: Work) -> Captured:
    """As a graph does: the same work into the same outputs, when it is told to."""
    outputs: Any = []

    def replay() -> None:
        done = work()
        for old, new in zip(outputs, done):
            if old is not None and new is not None:
                old.copy_(new)
        outputs[:] = outputs or done

    return replay, outputs


def again(work: Work) -> Captured:
    """The same, and once at first, as a device does to capture it."""
    replay, outputs = later(work)
    replay()
    return replay, outputs


class Plain(Decoder):
    """Its layers as a CPU has them, wherever it is."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._fused_blocks = None

    @property
    def _kernels_read(self) -> bool:
        return False


class Fused(Decoder):
    """Its layers as a GPU has them, wherever it is."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if can_fuse(self.config, experts=True):
            self._fused_blocks = connect_blocks(
                [FusedBlock(block, head_turns_of(block)) for block in self._blocks]
            )
        else:
            self._fused_blocks = tuple(map(CapturedBlock, self._blocks))


class Invariant(Fused):
    """The same, where rows are alike in any company."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.batch_invariant = True
        self._fused_blocks = connect_blocks(
            [FusedBlock(block, head_turns_of(block), invariant=True) for block in self._blocks]
        )


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (4, 4), (9, None)])
def test_a_frame_runs_in_the_next_larger_graph(rows: int, bucket: int | None) -> None:
    assert bucket_of(rows, (8, 1, 4)) == bucket


def fill(room: TableRoom, tables: AttentionTables) -> list[Numbers] | None:
    """Tables padded to the sizes of a graph, in the order of its shapes; None if they do not fit."""
    pieces = room.fill_pieces(PieceTables(tables.pieces, tables.starts, tables.slots, tables.pages))
    sights = RowSights(tables.leads, tables.bases, tables.bits)
    return pieces and [pieces[0], *room.fill_sights(sights), *pieces[1:]]


def test_tables_that_fit_are_padded_with_nothing() -> None:
    spans = [RowSpan(3, 20, 3, (4, 1, 2), ancestry((0, 0, 1))), RowSpan(1, 9, 1, (4, 3), (1,))]
    room, tables = TableRoom(8, 4, 12), tabulate(spans, PAGE, 4)
    filled = there(fill(room, tables))
    pieces, leads, _, bits, starts, slots, pages = filled
    assert [part.shape for part in filled[:-1]] == list(room.shapes[:-1])
    assert pieces[: len(tables.pieces)].tolist() == tables.pieces.tolist()
    assert not any(part.any() for part in (pieces[len(tables.pieces) :], leads[4:], bits[4:]))
    assert starts[4:].tolist() == [len(tables.slots)] * 5, "rows that are too many merge nothing"
    assert slots[: len(tables.slots)].tolist() == tables.slots.tolist()
    assert pages.tolist() == tables.pages.tolist(), "no more than is in use"
    assert fill(TableRoom(8, 4, len(tables.pages) - 1), tables) is None
    assert fill(TableRoom(2, 4, 12), tables) is None


def test_frames_of_two_shared_prefixes_fit() -> None:
    """Of any number of rows, up to as many as the graph has."""
    for seed in range(examples(150)):
        rng = random.Random(seed)
        most, tile_rows = rng.choice((1, 4, 16, 64, 200, 512)), rng.choice((8, 16, 64))
        fresh = count()
        shared = [next(fresh) for _ in range(rng.choice((0, 1, 16, 128)))]
        spans = list[RowSpan]()
        while (left := most - sum(span.rows for span in spans)) > 0:
            pages = shared + [next(fresh) for _ in range(rng.choice((0, 1, 8, 40)))]
            for rows in rng.choices((1, 1, 5, 33, 60, 200), k=rng.randrange(1, 9)):
                rows, base = min(rows, left), len(pages) * PAGE + rng.randrange(rng.choice((8, 80, 800)))
                own = [next(fresh) for _ in range(-(-(base + rows) // PAGE) - len(pages))]
                spans += [RowSpan(rows, base, rows, (*pages, *own))] if rows else []
                left -= rows
        tables, room = tabulate(spans, PAGE, tile_rows), TableRoom(most, tile_rows, next(fresh))
        assert fill(room, tables) is not None


# The first layer does not run.
NEAR = {"sliding_window": 3}
BOTH = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
# What a page holds of a token with latent attention: 16 rotated numbers, and 48 that are also its value.
ROW = {"qk_rope_head_dim": 16, "kv_lora_rank": 48}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_neox": {},
    "mistral": NEAR,
    "gemma2": {**NEAR, "query_pre_attn_scalar": 24, "layer_types": ["full_attention", "sliding_attention"]},
    "gemma3_text": NEAR,
    # Two blocks of 33 heads of latent attention.
    "youtu": {"num_attention_heads": 66, "num_key_value_heads": 66, **ROW},
    "ministral3": {"rope_parameters": {**GROWING, "original_max_position_embeddings": 2}},
    **(
        {"llama": {}, "phi3": {"partial_rotary_factor": 0.5}}
        if DEVICE == "cuda"
        # on a GPU grouped products wait for the host, except in bf16: see test_decoder.py
        else {"glm4_moe": {}, "gpt_oss": NEAR | BOTH, "deepseek_v3": {"num_key_value_heads": 2, **ROW}}
    ),
}


@pytest.mark.parametrize(
    ("kind", "kept"),
    some(
        [("mistral", "int8"), ("mistral", "auto"), *((kind, "auto") for kind in KINDS if kind != "mistral")],
        0,
        *range(2, 1 + len(KINDS)),
    ),
)
def test_steps_are_what_layers_do_one_by_one(tmp_path: Path, kind: str, kept: KvDtype) -> None:
    """Three rows in a graph of four, one in none; and two on the next page, where there is a window."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, **KINDS[kind]}
    write_model(tmp_path, kind, "1GB", **shape)
    layers = Range(1, shape["num_hidden_layers"])
    plain, fused = (each.load(tmp_path, layers, KIND, DEVICE, kv_dtype=kept) for each in (Plain, Fused))
    g = plain.config.heads // plain.config.kv_heads
    taps = {layers.last: torch.eye(plain.config.hidden, dtype=KIND, device=DEVICE)}
    kvs = [each.make_kv(4, PAGE) for each in (plain, fused)]
    steps = CapturedSteps(fused, kvs[1], taps, GraphCapture() if DEVICE == "cuda" else again, (4,))
    window, pages = plain.config.window, (3, 1)
    for base, parents in ((0, (0, 0, 1)), (3, (0,)), *([(12, (0, 0))] if window else [])):
        rows = range(base, base + len(parents))
        seeded = torch.Generator().manual_seed(base)
        entry = torch.randn(len(rows), plain.config.hidden, generator=seeded).to(DEVICE, KIND)
        slots = [pages[row // PAGE] * PAGE + row % PAGE for row in rows]
        spans = [RowSpan(len(rows), base, len(rows), pages[: 1 + base // PAGE], ancestry(parents))]
        at, places = torch.tensor(list(rows), device=DEVICE), torch.tensor(slots, device=DEVICE)
        plan = plain.plan(spans, PAGE, "packed")
        wanted = plain.forward(entry.clone(), at, places, plan, kvs[0], taps)
        if len(rows) > 1:
            found = steps.run(StepRows(entry, rows, slots, spans))
        else:
            whole, near = (
                plan_with_kernel(plan_attention(spans, PAGE, g, DEVICE, window=seen))
                for seen in (None, window)
            )
            kernels = replace(whole, sliding=near)
            found = fused.forward(entry.clone(), at, places, kernels, kvs[1], taps)
        assert found is not None
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    for one, other in zip(*([as_numbers(layer, KIND) for layer in kv.layers] for kv in kvs)):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", some([Fused, Invariant], 0))  # Both move rows by the same graph.
def test_kept_rows_are_moved_before_the_next_tree(kind: type[Decoder], tmp_path: Path) -> None:
    """On one page, then over the edge of the next; as many as a graph moves itself, and more."""
    write_model(tmp_path, "llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    plain, fused = (each.load(tmp_path, Range(0, 2), KIND, DEVICE) for each in (Plain, kind))
    kvs = [each.make_kv(4, PAGE) for each in (plain, fused)]
    steps = CapturedSteps(
        fused, kvs[1], {}, GraphCapture() if DEVICE == "cuda" else again, (MIN_ROWS_WITH_MOVES,)
    )
    pages, many = (3, 1), MAX_GRAPH_MOVES + 1
    for base, parents, moves in (
        (0, (0, 0, 0, 2), ()),
        (3, (0, 0, 1, 0), ((26, 25), (27, 26))),
        (6, (0, 0, 0, 2), ((29, 28), (30, 29))),
        (8, (0, 0), ((8, 31), *((9, 9) for _ in range(many)))),
    ):
        columns = range(base, base + len(parents))
        slots = [pages[column // PAGE] * PAGE + column % PAGE for column in columns]
        at = [base + depth for depth in depths(parents)]
        spans = [RowSpan(len(parents), base, len(parents), pages, ancestry(parents))]
        places = torch.tensor(slots, device=DEVICE)
        if moves:
            kvs[0].move(moves)
        plan = plan_readings(spans, PAGE, 2, "packed", KIND, DEVICE)
        tokens = [7 + column for column in columns]
        entry, turns = plain.embed(torch.tensor(tokens, device=DEVICE)), torch.tensor(at, device=DEVICE)
        wanted, _ = plain.forward(entry, turns, places, plan, kvs[0])
        found = there(steps.run(StepRows(tokens, at, slots, spans, moves)))
        torch.testing.assert_close(found[0], wanted, atol=2e-2, rtol=2e-2)
    for one, other in zip(kvs[1].layers, kvs[0].layers):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_prompts_alone_have_graphs_of_their_own(tmp_path: Path) -> None:
    """One, then its end beside another; fewer rows than two thirds, and trees, are not for them."""
    write_model(
        tmp_path, "llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    plain, fused = (each.load(tmp_path, Range(0, 2), KIND, DEVICE) for each in (Plain, Fused))
    kvs = [each.make_kv(5, 16) for each in (plain, fused)]
    assert prompt_buckets(fused, kvs[1]) == PROMPT_BUCKETS
    capture = GraphCapture() if DEVICE == "cuda" else again
    steps = CapturedSteps(fused, kvs[1], {}, capture, (1,), prompt_sizes=(24,))
    first, other = (3, 1), (2,)
    for spans in ([RowSpan(20, 0, 20, first)], [RowSpan(7, 20, 7, first), RowSpan(12, 0, 12, other)]):
        at = [row for span in spans for row in range(span.base, span.base + span.rows)]
        own = [span.pages for span in spans for _ in range(span.rows)]
        slots = [pages[row // 16] * 16 + row % 16 for row, pages in zip(at, own)]
        tokens = [7 + row for row in at]
        entry, turns, places = (torch.tensor(each, device=DEVICE) for each in (tokens, at, slots))
        plan = plan_readings(spans, 16, 2, "packed", KIND, DEVICE)
        wanted, _ = plain.forward(plain.embed(entry), turns, places, plan, kvs[0])
        found = there(steps.run(StepRows(tokens, at, slots, spans)))
        assert (found[0] - wanted).norm() < 1e-2 * wanted.norm()
    assert steps.run(StepRows(tokens[:15], at[:15], slots[:15], [RowSpan(15, 0, 15, first)])) is None
    tree = RowSpan(20, 0, 20, first, ancestry((0,) * 20))
    assert steps.run(StepRows([7] * 20, [0] * 20, range(20), [tree])) is None


@pytest.mark.parametrize(
    ("sizes", "rows", "kept"),
    some(
        [
            ((8, 7, 2), 48, "auto"), ((9, 7, 1), 56, "auto"), ((17,), 56, "auto"), ((5, 3), 8, "auto"),
            ((10, *(7,) * 7), 72, "auto"), ((9,) * 7, 80, "auto"), ((33, *(4,) * 7), 80, "auto"),
            ((20, 20, 20), 80, "auto"), ((8, 7, 2), 56, "int8"),
        ],
        *(0, 4, 8),
    ),
)  # fmt: skip
def test_sequences_of_a_few_rows_each_have_graphs_of_their_own(
    sizes: Sequence[int], rows: int, kept: KvDtype, tmp_path: Path
) -> None:
    """Not one text of as many rows, nor one that is long beside others, nor where a smaller graph does. Of
    few rows each text's are one tile, and KV is not in int8.
    """
    write_model(tmp_path, "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    plain, fused = (each.load(tmp_path, Range(0, 1), KIND, DEVICE, kv_dtype=kept) for each in (Plain, Fused))
    kvs = [each.make_kv(24, 16) for each in (plain, fused)]
    capture = GraphCapture() if DEVICE == "cuda" else later
    steps = CapturedSteps(fused, kvs[1], {}, capture, (8, 56, 80), short_sizes=(48, 72))
    pages = [tuple(range(3 * number, 3 * number + 3)) for number in range(len(sizes))]
    spans = [RowSpan(each, 0, each, own) for each, own in zip(sizes, pages)]
    at = [row for span in spans for row in range(span.rows)]
    slots = [span.pages[row // 16] * 16 + row % 16 for span in spans for row in range(span.rows)]
    tokens = [7 + number for number in range(len(at))]
    step = StepRows(tokens, at, slots, spans)
    filled = there(steps.fill(step))
    assert len(filled.numbers[0]) == 2 * MAX_GRAPH_MOVES + 3 * rows
    entry, turns, places = (torch.tensor(each, device=DEVICE) for each in (tokens, at, slots))
    plan = plan_readings(spans, 16, 2, "packed", KIND, DEVICE)
    wanted, _ = plain.forward(plain.embed(entry), turns, places, plan, kvs[0])
    assert (steps.launch(filled, tokens)[0] - wanted).norm() < 1e-2 * wanted.norm()


class ToldTrees:
    """Trees of three nodes that are known here; they are written where a graph reads them."""

    nodes, taken = 3, False

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], tokens: Sequence[int], bases: Sequence[int]
    ) -> None:
        seen = [bits for parents in shapes for bits in ancestry(parents)]
        depths = [bits.bit_count() - 1 for bits in seen]
        at = [base + depth for base, depth in zip((base for base in bases for _ in range(3)), depths)]
        self.positions, self._told = at, (tokens, at, [[bits] for bits in seen])

    def choose(
        self, tokens: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor, vocabulary: int
    ) -> None:
        assert vocabulary > max(self._told[0])
        assert (tokens[: len(self.positions) : 3].tolist()) == list(self._told[0][::3]), "roots are there"
        for target, told in zip((tokens, positions, bits), self._told):
            target[: len(told)] = torch.tensor(told, device=DEVICE)


@pytest.mark.parametrize(("kind", "made"), [("llama", Fused), ("mistral", Fused), ("llama", Invariant)])
def test_trees_that_a_device_chooses_run_as_if_the_host_had_read_them(
    kind: str, made: type[Decoder], tmp_path: Path
) -> None:
    """But not where layers see windows, whose tables no device writes."""
    windows = NEAR if kind == "mistral" else {}
    write_model(tmp_path, kind, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **windows)
    decoder = made.load(tmp_path, Range(0, 1), KIND, DEVICE)
    kv = decoder.make_kv(6, PAGE)
    steps = CapturedSteps(decoder, kv, {}, GraphCapture() if DEVICE == "cuda" else again, (8,))
    assert steps.accepts_device_trees == (kind == "llama")
    if not steps.accepts_device_trees:
        return
    bases, tokens, pages = (2, 5), [7, 8, 9, 17, 18, 19], ((3, 1, 4), (5, 0, 2))
    shapes = (0, 0, 1), (0, 0, 0)
    slots = [own[(base + row) // PAGE] * PAGE + (base + row) % PAGE
             for base, own in zip(bases, pages) for row in range(3)]  # fmt: skip

    def step(parents: Sequence[tuple[int, ...]], at: Sequence[int]) -> StepRows:
        spans = [RowSpan(3, base, 3, own, ancestry(each)) for base, own, each in zip(bases, pages, parents)]
        return StepRows(tokens, at, slots, spans)

    trees = ToldTrees(shapes, tokens, bases)
    wanted = steps.run(step(shapes, trees.positions))
    unknown = steps.fill(step(((0, 0, 0),) * 2, [base for base in bases for _ in range(3)]))
    assert wanted
    assert unknown
    assert torch.equal(steps.launch_device_trees(unknown, tokens[::3], trees)[0], wanted[0])
    assert not torch.equal(steps.launch(unknown, tokens)[0], wanted[0]), "shapes tell"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_range_without_graphs_is_measured_while_another_thread_captures(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    decoder = Plain.load(tmp_path, Range(0, 1), KIND, DEVICE)
    assert not decoder.capturable
    before = torch.ones(1, device=DEVICE)

    def work() -> tuple[torch.Tensor, None]:
        with ThreadPoolExecutor(1) as other:
            assert other.submit(measure_rows, decoder, (1, 4), 0.0).result()
        return before + 1, None

    replay, (after, _) = GraphCapture()(work)
    before.fill_(2)
    replay()
    assert after.item() == 3
