"""A text fed to a stage in pieces as random as may be, and what the stage made of each of its rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specsot.core.frames import Frame, Opening, PromptChunk, Segment, TreeSegment
from specsot.core.tree import Tree, depths

if TYPE_CHECKING:
    import torch

PAGE, TEXT = 16, tuple(random.Random(3).choices(range(90), k=220))


@dataclass
class Writer:
    """Feeds the text to a stage, in pieces as random as may be; trees hold it somewhere, and other things."""

    sequence: int
    rng: random.Random
    fed: int = 0
    keep: tuple[int, ...] = ()
    draft_round: int = 0
    every: int = len(TEXT)  # nothing reaches across a multiple of it
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def reach(self) -> int:
        """Positions from here on that one segment may cover."""
        return min(self.every - self.fed % self.every, len(TEXT) - self.fed)

    def chunk(self, count: int, final: bool) -> tuple[Segment, dict[int, int]]:
        start, self.fed = self.fed, self.fed + count
        tokens = TEXT[start : self.fed]
        return PromptChunk(self.sequence, start, tokens, final), {start + i: i for i in range(count)}

    def tree(self) -> tuple[Segment, dict[int, int]]:
        """A path of the text among nodes that are not; the path is what will be kept."""
        depth = min(self.rng.randrange(1, 7), self.reach)
        tokens, parents, path = [TEXT[self.fed]], [0], [0]
        while len(path) < depth:
            parent = self.rng.randrange(len(parents))
            if self.rng.random() < 0.5 and depths(parents)[parent] + 1 < self.reach:
                tokens.append(7)
                parents.append(parent)
            else:
                tokens.append(TEXT[self.fed + len(path)])
                parents.append(path[-1])
                path.append(len(tokens) - 1)
        self.draft_round += 1
        growth = TreeSegment(
            self.sequence, self.draft_round, self.fed, self.keep, Tree(tuple(tokens), tuple(parents))
        )
        where = {self.fed + i: node for i, node in enumerate(path)}
        self.keep, self.fed = tuple(path), self.fed + len(path)
        return growth, where

    def next(self, prompt: int) -> tuple[Segment, dict[int, int]]:
        if self.fed >= prompt:
            return self.tree()
        count = min(self.rng.choice((1, 5, 40, 90)), prompt - self.fed, self.reach)
        return self.chunk(count, self.fed + count == prompt)


def write(writers: list[Writer], stage, prompt: int, number: int, openings: tuple[Opening, ...] = ()) -> None:
    """One frame for all who have text left; what it says of each row is kept."""
    growing = [writer for writer in writers if writer.fed < len(TEXT)]
    parts = [writer.next(prompt) for writer in growing]
    left = stage.run(Frame(1, number, openings, tuple(segment for segment, _ in parts)))
    first = 0
    for writer, (segment, where) in zip(growing, parts):
        writer.rows |= {position: left.hidden[first + row].clone() for position, row in where.items()}
        first += len(segment.tokens if isinstance(segment, PromptChunk) else segment.tree)


def feed(
    writers: list[Writer], stage, prompt: int, openings: tuple[Opening, ...] = (), first: int = 1
) -> None:
    """All that is left of the text, in frames numbered from `first` on."""
    for number in range(first, 400):
        write(writers, stage, prompt, number, openings if number == first else ())
        if all(writer.fed == len(TEXT) for writer in writers):
            return


def rows_of(writer: Writer, start: int = 0) -> torch.Tensor:
    """What the stage said of the text from there on, [rows, H]."""
    import torch

    return torch.stack([writer.rows[position] for position in range(start, len(TEXT))])


def whole(decoder: Any, plan: Any) -> torch.Tensor:
    """What a decoder of no stage says of the text at once, [rows, H]."""
    import torch

    at = torch.arange(len(TEXT))
    kv = decoder.make_kv(-(-len(TEXT) // PAGE), PAGE)
    return decoder.forward(decoder.embed(torch.tensor(TEXT)), at, at, plan, kv)[0]
