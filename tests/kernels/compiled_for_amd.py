"""Compiles kernels for one of AMD's GPUs, and launches none. Needs no GPU, and no interpreter of Triton."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specsot_kernels import TreeMaskMode, gpu
from specsot_kernels.gpu.attention import attend, plan_attention
from specsot_kernels.gpu.ordered import multiply_ordered
from specsot_kernels.gpu.products import multiply_row
from specsot_kernels.gpu.rows import gate, norm_rows
from specsot_kernels.gpu.small_attention import attend_small, plan_small_step
from specsot_kernels.gpu.small_products import add_and_norm, add_up, multiply_small, sum_in_parts
from specsot_kernels.gpu.whole import multiply_whole, round_rows
from tests.kernels.drafting import VOCABULARY, draft, lists_of
from tests.kernels.spans import PAGE, PAGES, branches

ELF = b"\x7fELF"
RUN = JITFunction.run
DEVICES = count(100)  # Triton keeps what it has compiled by the number of a device.


class OneTarget:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, next(DEVICES)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.name, 64)


def compile_all(name: str, head_dim: int) -> list[str]:
    """Return the kernels of which a program for that GPU was made: all that are launched meanwhile.

    head_dim: size of an attention head, which decides how long attention takes to compile.
    """
    compiled = list[str]()

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **more: Any) -> None:
        made = RUN(kernel, *given, grid=grid, warmup=True, **more)
        assert made.asm["hsaco"].startswith(ELF)
        assert f"amdhsa--{name}" in made.asm["amdgcn"]
        compiled.append(kernel.fn.__name__)

    driver.set_active(OneTarget(name))
    JITFunction.run = run
    launch_all(head_dim)
    return compiled


def launch_all(head_dim: int) -> None:
    """EAGLE's tree functions, tree attention, and what surrounds it, once each."""
    k, steps, nodes = 2, 3, 8
    lists = lists_of([draft(random.Random(1), k, steps) for _ in range(2)])
    scores, tokens, parents = ([torch.from_numpy(each) for each in one] for one in lists)
    chosen = gpu.organize_draft_results(scores, tokens, parents, nodes)
    roots, lengths = torch.arange(2), torch.tensor([9, 30], dtype=torch.int32)
    for mode in TreeMaskMode:
        arrays = gpu.build_trees(roots, *chosen, lengths, k, mode, None)
    gpu.arrange_trees(torch.ones(2, 6).long(), torch.zeros(2, 6).long(), lengths, mode, None)
    trees = (arrays.draft_tokens.view(2, nodes), *arrays[2:5])
    gpu.verify_tree_greedy(trees[0], torch.ones(2, nodes).long(), *trees[1:], steps)
    coins, chances = torch.rand(2, nodes), torch.rand(2, nodes, VOCABULARY)
    gpu.tree_speculative_sampling(*trees, coins, coins[:, 0].clone(), chances, None, 1.0, 1.0, steps)
    queries, kv = torch.zeros(17, 1, 2, head_dim), torch.zeros(2, PAGES, 1, PAGE, head_dim)
    plan = plan_attention(branches(random.Random(2), 2, 5, 6), PAGE, 2, torch.device("cpu"))
    attend(queries.bfloat16(), kv.bfloat16(), plan, None, None)
    row, weight = torch.ones(1, 512).bfloat16(), torch.ones(64, 512).bfloat16()
    multiply_row(norm_rows(row, weight[0], 1e-5), weight, None, None, False)
    gate(row)
    multiply_ordered(row.expand(2, -1), weight, parts=2)
    multiply_small(row, weight, (weight[0], 1e-5))
    sums = sum_in_parts(row, weight)
    add_and_norm(sums, weight[:1, :64].contiguous(), (weight[0], 1e-5))
    add_up(sum_in_parts(row, weight, into=sums), weight[:1, :64].contiguous())
    small_plan = plan_small_step(branches(random.Random(2), 2, 5, 6), PAGE, 2, torch.device("cpu"))
    attend_small(queries.bfloat16(), kv.bfloat16(), small_plan)
    scales, counts = weight.new_zeros(64, dtype=torch.float32), weight.new_zeros(64, dtype=torch.int32)
    multiply_whole(*round_rows(row), weight.to(torch.int8), scales, counts)
