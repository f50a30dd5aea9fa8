"""Drafts with an EAGLE head: one layer or a few over the base's own features.

Refuses to know how many nodes pay, and other ways to draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specsot.arrange import window_of
from specsot.frames import Features, Lesson, Opening
from specsot.members import TreeShape
from specsot.model.laps import Graphs
from specsot_drafter.descent import Descents, Seed
from specsot_drafter.extension import extend
from specsot_drafter.following import Following
from specsot_drafter.grammar import guide_of, sift
from specsot_drafter.growth import Ground, Growth
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import fuse_head
from specsot_drafter.memory import Memory
from specsot_drafter.selection import Deserves, Offer, for_all
from specsot_drafter.streams import Stream
from specsot_drafter.texts import Text

WARMED = (512, 128, 32, 8, 1)  # rows of made-up prompts


class EagleDrafter:
    """See `Drafter`. A text whose features were missed once is drafted no more."""

    def __init__(self, head: DraftHead, shape: TreeShape, pages: int, page_rows: int) -> None:
        self.widths = (shape.top_k,) * shape.depth
        self._head, self._top_k, self._most = head, shape.top_k, shape.nodes - 1
        self._following = Following(head, pages, page_rows)
        self._graphs: Descents | None = None
        if graphs := _graphs(head, self._following.memory, shape):
            self._warm()
            self._graphs = graphs
            self._warm()

    @property
    def free_pages(self) -> int:
        return self._following.memory.table.free

    def due(self, texts: Sequence[Text]) -> int:
        return self._following.due

    def open(self, text: Text) -> None:
        self._following.open(text)

    def hear(self, batch: Features) -> None:
        self._following.hear(batch)

    def close(self, sequence: int) -> None:
        self._following.close(sequence)

    def catch_up(self) -> None:
        self._following.catch_up(())

    def most_levels(self, text: Text) -> int:
        """A node at depth room - 1, or at the base's last position, is the last that can be of use."""
        if text.sequence not in self._following.streams:
            return 0
        depth = min(text.room - 1, text.reach(self._head.positions) - 1 - text.committed)
        return max(min(len(self.widths) + 1, depth), 0)

    def offer(self, texts: Sequence[Text], levels: int, deserves: Deserves | None = None) -> Offer | None:
        found = [self._ground(text) for text in texts]
        growing = [(stream, ground) for stream, ground in found if stream and ground]
        if not growing:
            return None
        streams, grounds = [stream for stream, _ in growing], [ground for _, ground in growing]
        own = [stream.text for stream in streams]
        offer = self._descend(streams, grounds, levels)
        if offer is not None:
            offer = sift(offer, own, self._most)
        else:
            last, guide = self._following.catch_up(streams), guide_of(self._head, own)
            growth = Growth(self._head, self._following.memory.kv, grounds, self._top_k, guide)
            offer = growth.run(last, levels, deserves)
        return for_all(offer, [bool(stream and ground) for stream, ground in found])

    @torch.inference_mode()
    def _warm(self) -> None:
        """Follow made-up texts and draft for them: what a GPU compiles and loads for such rows is there when
        somebody waits, and no clock takes it for what drafts cost.
        """
        for rows in WARMED:
            text = Text(Opening(0, prompt=rows, limit=rows))
            self.open(text)
            for told in (rows, 1):
                lesson = Lesson(0, text.committed, (0,) * told, 0, 1)
                text.hear(lesson)
                payload = torch.zeros(told, self._head.width, dtype=self._head.dtype)
                self.hear(Features(0, 0, lessons=(lesson,), rows=payload))
                self.offer([text], min(2, len(self.widths) + 1))
            self.close(text.sequence)

    def _descend(self, streams: Sequence[Stream], grounds: Sequence[Ground], levels: int) -> Offer | None:
        """All of it in one graph, where there is one. A level more costs less than asking whether it pays,
        and a wrong guess less than asking a grammar between levels.
        """
        graphs, following = self._graphs, self._following
        windows = any(window_of(stream.text.opening) for stream in streams)
        if graphs is None or windows:
            return None
        if any(stream.due > graphs.due for stream in streams) or following.due > sum(s.due for s in streams):
            following.catch_up(())  # what no graph has room for; the last row of each is due again
        due = following.take(streams)
        offer = graphs.run([Seed(*each) for each in zip(due, grounds)], levels)
        if offer is None:
            extend(self._head, following.memory, due)
        return offer

    def _ground(self, text: Text) -> tuple[Stream | None, Ground | None]:
        stream = self._following.streams.get(text.sequence)
        ground = self._following.ground(stream, sum(self.widths)) if stream else None
        return stream, ground


def _graphs(head: DraftHead, memory: Memory, shape: TreeShape) -> Descents | None:
    """Where this head, on this machine, can be captured."""
    fused = fuse_head(head)
    if fused is None:
        return None
    from specsot.kernels.gpu.growing import grow

    return Descents(fused, memory, shape.top_k, shape.depth + 1, Graphs(), grow)
