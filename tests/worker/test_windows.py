"""A sequence behind a window: chunks, trees, moves, trimmed pages against one dense mask over all of it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from specsot.frames import Chunk, Fork, Frame, Growth, Opening, Segment
from specsot.members import Layout, Range
from specsot.params import Window
from specsot.tree import Tree
from tests.models import write_base

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAGE, TEXT = 16, tuple(random.Random(3).choices(range(90), k=220))
WINDOWS = [Window(4, 24), Window(0, 16), Window(20, 40)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory):
    from specsot.model.decoder import Decoder

    base = write_base(tmp_path_factory.mktemp("window") / "base")
    return Decoder.load(base, Range(0, 2), torch.float32, "cpu")


def dense(decoder, window: Window) -> torch.Tensor:
    """Hidden rows [text, H] of the whole text at once: a mask, and sinks met at min(p, sinks + recent)."""
    from specsot.model.attention import AttentionPlan

    config, count = decoder.config, len(TEXT)
    at = torch.arange(count)
    sink, near = at[None] < window.sinks, at[None] >= at[:, None] - window.recent
    seen = (sink | near) & (at[None] <= at[:, None])
    steps = (at - window.sinks - window.recent).clamp_min(0)
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = -steps[:, None] * config.rope.theta**-exponents

    def attend(q: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        keys, values = layer.transpose(2, 3).flatten(1, 2)[:, :count]  # [rows, heads, dim]
        even, odd = q[..., 0::2], q[..., 1::2]
        cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        plain = torch.einsum("rhgd,chd->hgrc", q, keys)
        scores = torch.where(sink, torch.einsum("rhgd,chd->hgrc", turned, keys), plain)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hgrc,chd->rhgd", weights, values).flatten(1)

    kv = decoder.make_kv(-(-count // PAGE), PAGE)
    plan = AttentionPlan((), (), None, None, attend)
    hidden, _ = decoder.forward(decoder.embed(torch.tensor(TEXT)), at, at, plan, kv)
    return hidden


@dataclass
class Writer:
    """Feeds the text to a stage, in pieces as random as may be; trees hold it somewhere, and other things."""

    stage: object
    sequence: int
    rng: random.Random
    fed: int = 0
    keep: tuple[int, ...] = ()
    step: int = 0
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def chunk(self, count: int, final: bool) -> tuple[Segment, dict[int, int]]:
        start, self.fed = self.fed, self.fed + count
        tokens = TEXT[start : self.fed]
        return Chunk(self.sequence, start, tokens, final), {start + i: i for i in range(count)}

    def tree(self) -> tuple[Segment, dict[int, int]]:
        """A path of the text among nodes that are not; the path is what will be kept."""
        depth = min(self.rng.randrange(1, 7), len(TEXT) - self.fed)
        tokens, parents, path = [TEXT[self.fed]], [0], [0]
        while len(path) < depth:
            if self.rng.random() < 0.5:
                tokens.append(7)
                parents.append(self.rng.randrange(len(parents)))
            else:
                tokens.append(TEXT[self.fed + len(path)])
                parents.append(path[-1])
                path.append(len(tokens) - 1)
        self.step += 1
        growth = Growth(self.sequence, self.step, self.fed, self.keep, Tree(tuple(tokens), tuple(parents)))
        where = {self.fed + i: node for i, node in enumerate(path)}
        self.keep, self.fed = tuple(path), self.fed + len(path)
        return growth, where

    def next(self, prompt: int) -> tuple[Segment, dict[int, int]]:
        if self.fed >= prompt:
            return self.tree()
        count = min(self.rng.choice((1, 5, 40, 90)), prompt - self.fed)
        return self.chunk(count, self.fed + count == prompt)


def write(writers: list[Writer], stage, prompt: int, number: int, openings: tuple[Opening, ...] = ()) -> None:
    """One frame for all who have text left; what it says of each row is kept."""
    growing = [writer for writer in writers if writer.fed < len(TEXT)]
    parts = [writer.next(prompt) for writer in growing]
    left = stage.run(Frame(1, number, openings, tuple(segment for segment, _ in parts)))
    first = 0
    for writer, (segment, where) in zip(growing, parts):
        writer.rows |= {position: left.hidden[first + row].clone() for position, row in where.items()}
        first += len(segment.tokens if isinstance(segment, Chunk) else segment.tree)


@pytest.mark.parametrize("layout", ["packed", "batched"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{window.sinks}+{window.recent}")
def test_windows_give_what_one_dense_mask_gives(decoder, window: Window, layout: Layout):
    from specsot_worker.stage import Stage

    expected, stage = dense(decoder, window), Stage(decoder, 40, PAGE, layout)
    writers = [Writer(stage, sequence, random.Random(sequence)) for sequence in (1, 2)]
    openings = tuple(Opening(writer.sequence, 60, window=window) for writer in writers)
    for number in range(1, 400):
        write(writers, stage, 60, number, openings if number == 1 else ())
        if all(writer.fed == len(TEXT) for writer in writers):
            break
    for writer in writers:
        found = torch.stack([writer.rows[position] for position in range(len(TEXT))])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_windows_hold_memory_flat(decoder):
    from specsot_worker.stage import Stage

    window, stage = Window(4, 24), Stage(decoder, 8, PAGE)
    (writer,) = writers = [Writer(stage, 1, random.Random(1))]
    write(writers, stage, 1, 1, (Opening(1, 1, window=window),))
    held = 0
    while writer.fed < len(TEXT):
        write(writers, stage, 1, writer.step + 2)
        held = max(held, stage.table.count - stage.table.free)
    assert held == 1 + 3 + 1  # sinks; what is recent, wherever it begins in a page; a tree beyond


def test_a_fork_looks_through_the_window_of_its_source(decoder):
    from specsot_worker.stage import Stage

    window, stage = Window(4, 24), Stage(decoder, 40, PAGE)
    source, fork = Writer(stage, 1, random.Random(1)), Writer(stage, 2, random.Random(2))
    write([source], stage, 100, 1, (Opening(1, 100, decodes=False, window=window),))
    for number in range(2, 50):
        if source.fed == 100:
            break
        write([source], stage, 100, number)
    fork.fed = 100
    write([fork], stage, 130, 50, (Opening(2, 130, Fork(1, 100), window=window),))
    for number in range(51, 200):
        write([fork], stage, 130, number)
        if fork.fed == len(TEXT):
            break
    found = torch.stack([fork.rows[position] for position in range(100, len(TEXT))])
    torch.testing.assert_close(found, dense(decoder, window)[100:], atol=1e-4, rtol=1e-4)
