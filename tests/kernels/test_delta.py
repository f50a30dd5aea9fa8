"""Gated delta layers by kernels, row by row and by chunks, against the rule written out in fp64."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from specsot.core.tree import ancestry
from specsot_kernels.segments import RowSpan
from specsot_model.core import replays, walks
from specsot_model.core.replays import CachedStates
from specsot_model.core.walks import (
    BLOCK_ROWS,
    SequenceRows,
    in_blocks,
    mark_saved_states,
    sequences_of_frame,
)

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu import delta  # noqa: E402
from specsot_kernels.gpu.delta import DeltaRule, WalkTables, run_delta  # noqa: E402

PAGE, STATES, TAPS = 64, 8, 4
NEAR = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # chunks of 16-bit numbers multiply as tensor cores do
TREE = (0, 0, 1, 1, 0, 4, 5)


def written_out(inputs: Tensor, rule: DeltaRule) -> Tensor:
    """[rows, value_heads, value_dim] of one text's rows, all from the first one on."""
    inputs, taps = inputs.double(), rule.taps.double()
    keys, values, heads = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim, rule.value_heads
    padded = torch.cat((inputs.new_zeros(TAPS - 1, rule.mixed), inputs[:, : rule.mixed]))
    mixed = sum(padded[at : at + len(inputs)] * taps[at] for at in range(TAPS))
    q, k, v = torch.nn.functional.silu(torch.as_tensor(mixed)).split((keys, keys, values), 1)
    group = heads // rule.key_heads
    split = [each.unflatten(1, (rule.key_heads, -1)) for each in (q, k)]
    q, k = ((each * ((each**2).sum(-1, True) + 1e-6).rsqrt()).repeat_interleave(group, 1) for each in split)
    b, a = inputs[:, rule.mixed : rule.mixed + 2 * heads].split((heads, heads), 1)
    rates, v = b.sigmoid(), v.unflatten(1, (heads, -1))
    decays = (rule.decay.double() * torch.nn.functional.softplus(a + rule.bias.double())).exp()
    state, out = inputs.new_zeros(heads, rule.key_dim, rule.value_dim), list[Tensor]()
    for row in range(len(inputs)):
        state = state * decays[row][:, None, None]
        new = (v[row] - torch.einsum("hkv,hk->hv", state, k[row])) * rates[row][:, None]
        state = state + k[row][:, :, None] * new[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[row]) * rule.key_dim**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("heads", "dims", "kind"),
    [
        ((2, 4), (8, 5), torch.float32),
        pytest.param((2, 4), (128, 128), torch.float32, marks=pytest.mark.gpu),
        pytest.param((2, 4), (128, 128), torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_chunks_and_rows_are_those_of_the_rule_wherever_a_run_began(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    dims: tuple[int, int],
    kind: torch.dtype,
    alike: bool,
) -> None:
    """Two texts side by side: prompts by chunks, trees whose root stays, prompts that begin within a chunk, a
    row. From kept states, and anew in blocks, with the same bits. alike: a token that comes again and again,
    and is kept long; sums of chunks must not grow with that.
    """
    if DEVICE == "cpu" and (dims[0] > 8 or not alike):
        pytest.skip("needs a CUDA device")
    chunk, block = (replays.CHUNK, delta.BLOCK.value) if DEVICE == "cuda" else (16, 4)  # four blocks a chunk
    for module in (replays, walks, delta):
        monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(delta, "BLOCK", type(delta.BLOCK)(block))
    monkeypatch.setattr(replays, "CHUNKED_ROWS", chunk // 2)
    torch.manual_seed(1)
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    mixed = 2 * key_heads * key_dim + value_heads * value_dim
    half = -(-(mixed + 2 * value_heads) // 2)
    taps, bias = torch.randn(TAPS, mixed, device=DEVICE), torch.randn(value_heads, device=DEVICE)
    decay = -torch.rand(value_heads, device=DEVICE) * (1e-3 if alike else 1)
    rule = DeltaRule(key_heads, value_heads, key_dim, value_dim, half, taps, decay, bias)
    pages = torch.zeros(2, 12, 1, PAGE, half, device=DEVICE, dtype=kind)
    states = torch.zeros(STATES + 1, value_heads, key_dim, value_dim, device=DEVICE)
    given = torch.randn(2, 200, mixed + 2 * value_heads, device=DEVICE).to(kind)
    if alike:
        given[:, 1:] = given[:, :1]
        given[..., mixed : mixed + value_heads] = 6
    kept, owned, found = CachedStates(STATES, PAGE, 1), ((3, 1, 7, 2), (4, 0, 6, 5)), list[Tensor]()
    if DEVICE == "cpu":  # where kernels are interpreted
        given, owned = given[:1], owned[:1]
    total = 2 * chunk + 6
    wanted = [written_out(one[:total], rule) for one in given]
    most, tree = chunk + 6, len(TREE)
    for base, rows, stay in (
        (0, most, most),
        (most, tree, 1),
        (most + 1, chunk - 2, chunk - 2),
        (total - 1, 1, 1),
    ):
        seen = None if stay > 1 else ancestry(TREE[:rows])
        spans = [RowSpan(rows, base, rows, own, seen) for own in owned]
        at = torch.arange(base, base + rows, device=DEVICE)
        slots = torch.cat([torch.tensor(own, device=DEVICE)[at // PAGE] * PAGE + at % PAGE for own in owned])
        inputs = given[:, base : base + rows].flatten(0, 1).contiguous()
        run = partial(run_delta, inputs, slots.int(), pages, states, rule=rule)
        plans, anew = kept.find(spans), deepcopy(kept)
        for page in range(12):
            anew._free_state(page)
        before = run(walks=on_device(sequences_of_frame(anew.find(spans), TAPS - 1, PAGE, STATES), chunk))
        texts = sequences_of_frame(plans, TAPS - 1, PAGE, STATES)
        mark_saved_states(texts, kept.reserve(plans))
        blocks = on_device(texts, BLOCK_ROWS)
        assert any(walk.many_chunks for walk in blocks) is (rows > tree)
        after = run(walks=blocks)
        kept.commit()
        assert torch.equal(before, after)
        found.append(after.view(len(owned), rows, value_heads, -1)[:, :stay])
    for text, right in zip(torch.cat(found, 1).unbind(), wanted):
        assert (text.double() - right).norm() <= NEAR[kind] * right.norm()


def on_device(texts: list[SequenceRows], most: int) -> list[WalkTables]:
    blocks = in_blocks(texts, most)
    parts = [(walk.counts, walk.starts, walk.chunks, walk.rows) for walk in blocks]
    sent = [[torch.from_numpy(part).to(DEVICE) for part in each] for each in parts]
    return [
        WalkTables(*each, aside=walk.aside, many_chunks=int(walk.chunks[-1]))
        for each, walk in zip(sent, blocks)
    ]
