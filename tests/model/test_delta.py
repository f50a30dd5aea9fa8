"""Gated delta layers: the rule against Transformers', branches, kept drafts, trees and forks over pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from specsot.core.tree import ancestry, depths
from specsot_model.core.replays import CHUNK
from specsot_model.delta import apply_delta_rule
from specsot_model.delta_pages import DeltaPages
from tests.model.test_families import PROMPT
from tests.model.tiny import PAGE_ROWS, Ring, load, write_model


@pytest.mark.parametrize("rows", [1, 7, CHUNK, 2 * CHUNK + 3])
def test_the_rule_is_that_of_transformers(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(3, rows, size, generator=draw) for size in (8, 8, 5))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, beta = -torch.rand(3, rows, generator=draw), torch.rand(3, rows, generator=draw)
    theirs = [each.transpose(0, 1)[None] for each in (q * 8**0.5, k, v, decay, beta)]
    begun = torch.randn(1, 3, 8, 5, generator=draw)
    wanted, after = torch_recurrent_gated_delta_rule(*theirs, initial_state=begun, output_final_state=True)
    room = -(-rows // CHUNK) * CHUNK - rows
    q, k, v = (F.pad(each, (0, 0, 0, room))[None] for each in (q, k, v))
    decay, beta = (F.pad(each, (0, room))[None] for each in (decay, beta))
    found, states = apply_delta_rule(q, k, v, decay, beta, begun)
    torch.testing.assert_close(found[0, :, :rows], wanted[0].transpose(0, 1))
    torch.testing.assert_close(states[-1], after)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_rows_fed_in_parts_are_those_of_one_prompt(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_next")
    whole, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    ring = Ring.of(load(tmp_path, (1, 3)))
    near(torch.cat([ring.feed(PROMPT[at : at + 3], at)[0] for at in range(0, len(PROMPT), 3)]), whole)


def test_each_node_of_a_tree_sees_its_own_path(tmp_path: Path) -> None:
    """And rows kept of it are what the next ones stand on."""
    write_model(tmp_path, "qwen3_next")
    ring = Ring.of(load(tmp_path, (1, 3)))
    ring.feed(PROMPT, 0)
    start, tree, visible = len(PROMPT), [9, 30, 41, 5, 77], (0b1, 0b11, 0b101, 0b1011, 0b10101)
    found, _ = ring.feed(tree, start, [start, start + 1, start + 1, start + 2, start + 2], visible)
    for kept in ([0, 1, 3], [0, 2, 4]):
        plain, _ = Ring.of(load(tmp_path)).feed(PROMPT + [tree[node] for node in kept], 0)
        near(found[kept], plain[start:])
    slots = [
        ring.pages[(start + node) // PAGE_ROWS] * PAGE_ROWS + (start + node) % PAGE_ROWS for node in range(5)
    ]
    for kv in ring.kvs:
        kv.move([(slots[node], slots[place]) for place, node in enumerate([0, 2, 4])])
    after, _ = ring.feed([66], start + 3)
    plain, _ = Ring.of(load(tmp_path)).feed([*PROMPT, 9, 41, 77, 66], 0)
    near(after, plain[-1:])


def test_a_fork_inside_a_page_goes_on_from_there(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_next")
    ring = Ring.of(load(tmp_path))
    ring.feed(PROMPT, 0)
    (kv,) = ring.kvs
    assert isinstance(kv, DeltaPages)
    kv.copy_page(ring.pages[1], 12, 2)
    fork = Ring(ring.decoders, ring.kvs, pages=(ring.pages[0], 12, 13))
    found, _ = fork.feed([50, 8, 1], PAGE_ROWS + 2)
    plain, _ = Ring.of(load(tmp_path)).feed([*PROMPT[: PAGE_ROWS + 2], 50, 8, 1], 0)
    near(found, plain[-3:])


def test_a_step_is_the_same_bit_for_bit_wherever_its_run_began(tmp_path: Path) -> None:
    """From a kept state, or from the first row on: a prompt in pieces, single rows, a tree."""
    write_model(tmp_path, "qwen3_next")
    ring, draw = Ring.of(load(tmp_path, (2, 3))), random.Random(1)
    tokens = [draw.randrange(3, 100) for _ in range(PAGE_ROWS * 14)]
    parents = (0, 0, 1, 1, 0, 4, 5)
    kvs = [kv for kv in ring.kvs if isinstance(kv, DeltaPages)]
    start = 0
    for rows in (70, 50, 1, 7, 1, 62, 1, 1):
        tree = rows == len(parents)
        at = [start + depth for depth in depths(parents)] if tree else None
        step = tokens[start : start + rows], start, at, ancestry(parents) if tree else None
        found, _ = ring.feed(*step)
        short = [batch.slots.shape[1] for kv in kvs for batch in kv.batches]
        for kv in kvs:
            for page in range(kv.pages):
                kv._cached_states.discard_from(page)
        again, _ = ring.feed(*step)
        assert torch.equal(found, again)
        assert max(short) <= rows + 2 * CHUNK + 3, "what is behind the last state is not run again"
        start += 1 if tree else rows  # of a tree its root stays
    whole, _ = Ring.of(load(tmp_path)).feed(tokens[:start], 0)
    assert start > 2 * CHUNK
    near(found, whole[-1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives(tmp_path: Path) -> None:
    """There kernels read what the other layers attend to."""
    write_model(tmp_path, "qwen3_next")
    here, there = Ring.of(load(tmp_path)), Ring.of(load(tmp_path, device="cuda"))
    for at in (0, 7):
        part = PROMPT[at : at + 7]
        near(there.feed(part, at)[0].cpu(), here.feed(part, at)[0])
