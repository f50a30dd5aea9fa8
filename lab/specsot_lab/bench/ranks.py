"""How often a real head's r-th guess is the right one, level by level, on answers its base wrote.

    python -m specsot_lab.bench.ranks --model BASE --draft-model HEAD --texts FILE.jsonl [--json FILE]

The base reads each conversation once; then a tree grows behind every STEP-th token of its answers, and what
really followed is looked for in it. A level counts where the level above it held the right token among the
nodes that were fed. See `acceptance`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from specsot.core.frames import FeatureBatch, Features, Frame, Opening, PromptChunk
from specsot.members import Range, TreeShape
from specsot.model.config import read_config
from specsot.model.decoder import Decoder
from specsot_app.bench.results import RowLog
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_lab.train.rows import Row
from specsot_lab.train.text_files import rows_of
from specsot_master.text import Text as Tokens
from specsot_worker.stage import DecoderStage

LEVELS, K = 8, 10  # of the published trees
STEP = 7  # tokens from one tree to the next
PAGE, LONGEST = 64, 512  # rows of a conversation at most


@dataclass(slots=True)
class Counts:
    """Of each level: how often it was reached, and how often its r-th guess was right."""

    reached: list[int] = field(default_factory=lambda: [0] * LEVELS)
    right: list[list[int]] = field(default_factory=lambda: [[0] * K for _ in range(LEVELS)])

    def note(self, offer: Candidates, true: Sequence[int]) -> None:
        """true: the tokens behind the root."""
        for level, (guesses, token) in enumerate(zip(_guesses(offer, true), true)):
            self.reached[level] += 1
            if token in guesses:
                self.right[level][guesses.index(token)] += 1

    def rows(self) -> Iterator[dict[str, object]]:
        """A row a level, and one for all."""
        for level, (reached, right) in enumerate(zip(self.reached, self.right), 1):
            yield _row(f"level {level}", reached, right)
        yield _row("all levels", sum(self.reached), [sum(each) for each in zip(*self.right)])


def _row(name: str, reached: int, right: Sequence[int]) -> dict[str, object]:
    shares = [round(one / max(reached, 1), 4) for one in right]
    return {"name": name, "reached": reached, "right by rank": shares, "right": round(sum(shares), 4)}


def _guesses(offer: Candidates, true: Sequence[int]) -> Iterator[list[int]]:
    """The guesses below the true path, level by level, best first, as far as it was fed."""
    tokens, parents, above = offer.tokens[0].tolist(), offer.parents[0].tolist(), 0
    for token in true:
        own = [number for number, parent in enumerate(parents) if parent == above]
        if not own:
            return
        guesses = [tokens[number] for number in own]
        yield guesses
        if token not in guesses:
            return
        above = own[guesses.index(token)] + 1


@torch.inference_mode()
def record(decoder: Decoder, head: DraftHead, rows: Sequence[Row]) -> Counts:
    """Of all trees behind tokens that the base wrote."""
    counts, pages = Counts(), LONGEST // PAGE + 4
    stage, shape = DecoderStage(decoder, pages, PAGE), TreeShape(LEVELS - 1, K, 60)
    for layer, weight in head.tap_slices().items():
        stage.tap(layer, weight)
    for number, row in enumerate(rows, 1):
        tokens = row.tokens.tolist()[:LONGEST]
        opening, chunk = (
            Opening(number, len(tokens), decodes=False),
            PromptChunk(number, 0, tuple(tokens), True),
        )
        features: Tensor | None = stage.run(Frame(1, number, (opening,), (chunk,))).fused
        assert features is not None, "the head taps nothing"
        _follow(EagleProposer(head, shape, pages, PAGE), tokens, row.learned.tolist(), features, counts)
        stage.run(Frame(1, number, (), (), (number,)))
    return counts


def _follow(
    drafter: EagleProposer, tokens: list[int], written: list[bool], features: Tensor, counts: Counts
) -> None:
    """One conversation: taught in steps, a tree behind each."""
    text, done = DraftSequence(Opening(1, 1, limit=1 << 20)), 0
    drafter.open(text)
    for stop in range(written.index(True), len(tokens) - LEVELS, STEP):
        lesson = FeatureBatch(1, done, tuple(tokens[done:stop]), tokens[stop], 1)
        text.observe(lesson)
        drafter.observe(Features(1, 1, (), (lesson,), (), features[done:stop]))
        offer, done = drafter.propose([text], LEVELS), stop
        if offer is not None and all(written[stop : stop + 1 + LEVELS]):
            counts.note(offer, tokens[stop + 1 : stop + 1 + LEVELS])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--draft-model", "--texts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--most", type=int, default=80, help="conversations")
    parser.add_argument("--output", "--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    whole = Range(0, read_config(asked.model).layers)
    decoder = Decoder.load(asked.model, whole, torch.float32, "cpu")
    head = load_head(asked.draft_model, asked.model, torch.float32, "cpu")
    rows = [
        row for row in islice(rows_of(asked.texts, Tokens(asked.model), LONGEST, 0), asked.most) if row.useful
    ]
    counts = record(decoder, head, rows)
    settings = {"texts": asked.texts.name, "conversations": len(rows), "trees": counts.reached[0]}
    log = RowLog("ranks", settings, asked.output)
    for row in counts.rows():
        log.add(row)


if __name__ == "__main__":
    main()
