"""`specsot bench ranks`: how often a head's r-th guess is right, level by level, on answers its base wrote.

The base reads each conversation once; then a tree grows behind every STEP-th token of its answers, and what
really followed is looked for in it. A level counts where the level above it held the right token among the
nodes that were fed. See `acceptance`.

With shapes instead: tokens a step of a chain of the likeliest five and of trees of so many nodes, had they
been drafted in every step: a tree grows behind every token, then each shape's steps are walked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specsot.core.frames import FeatureBatch, Features, Frame, Opening, PromptChunk
from specsot.members import TreeShape
from specsot_app.fleet.options import Models
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import propose_with
from specsot_drafter.proposers import Proposer
from specsot_lab.bench.clock import RowLog
from specsot_lab.eval.core.aspect_table import interval_of
from specsot_lab.train.rows import Row
from specsot_lab.train.text_files import rows_of
from specsot_master.text import Text as Tokens
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage

# of the published trees
LEVELS = 8
K = 10
MOST = 256  # nodes of a head that drafts in one pass, whose likeliest paths are its tree
STEP = 7  # tokens from one tree to the next
# rows of a conversation at most
PAGE = 64
LONGEST = 512


@dataclass(slots=True)
class Counts:
    """Of each level: how often it was reached, and how often its r-th guess was right."""

    reached: list[int] = field(default_factory=lambda: [0] * LEVELS)
    right: list[list[int]] = field(default_factory=lambda: [[0] * K for _ in range(LEVELS)])

    def note(self, offer: Candidates, true: Sequence[int]) -> None:
        """Count the guesses of one tree. offer: its candidates. true: the tokens after the root."""
        for level, (guesses, token) in enumerate(zip(_guesses(offer, true), true)):
            self.reached[level] += 1
            if token in guesses:
                self.right[level][guesses.index(token)] += 1

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each level, and one for all."""
        for level, (reached, right) in enumerate(zip(self.reached, self.right), 1):
            yield _row(f"level {level}", reached, right)
        yield _row("all levels", sum(self.reached), [sum(each) for each in zip(*self.right)])


class ShapeSteps:
    """Tokens a step of each shape: of a chain (its nodes negative) and of trees of the likeliest nodes.

    What follows is on record, so a draft is accepted exactly where the ring would accept it.
    """

    def __init__(self, shapes: Sequence[int]) -> None:
        """Prepare for these shapes: number of nodes, negative for a chain."""
        self._taken: dict[int, list[int]] = {shape: [] for shape in shapes}  # behind each token of one text
        self._sums: dict[int, list[tuple[int, int]]] = {shape: [] for shape in shapes}  # tokens, steps a text
        self._depths: dict[int, list[int]] = {
            shape: [0] * (LEVELS + 1) for shape in shapes
        }  # steps by drafts

    def note(self, offer: Candidates, true: Sequence[int]) -> None:
        """Record how many drafts each shape would have accepted after one token. offer: the candidates. true:
        the tokens after the root.
        """
        for shape, taken in self._taken.items():
            taken.append(_accepted(offer, true, shape))

    def end_text(self) -> None:
        """Count the steps of each shape over the text that has ended."""
        for shape, taken in self._taken.items():
            place = steps = 0
            while place < len(taken):
                self._depths[shape][taken[place]] += 1
                place = place + taken[place] + 1
                steps = steps + 1
            if steps:
                self._sums[shape].append((place, steps))
            taken.clear()

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each shape: tokens a step over all texts."""
        for shape, sums in self._sums.items():
            name = f"chain of {-shape}" if shape < 0 else f"tree of {shape}"
            tokens, steps = (sum(each) for each in zip(*sums))
            means = [here / count for here, count in sums]
            weights = [count for _, count in sums]
            row: dict[str, object] = {
                "name": name,
                "texts": len(sums),
                "steps": steps,
                "tokens a step": round(tokens / steps, 3),
            }
            row |= {"95 %": [round(one, 2) for one in interval_of(means, weights)]}
            reached = [sum(self._depths[shape][depth:]) for depth in range(LEVELS + 1)]
            shares = [round(right / before, 3) for before, right in pairwise(reached) if before]
            yield row | {"accepted where reached": shares}


def _accepted(offer: Candidates, true: Sequence[int], shape: int) -> int:
    """Return how many of the true tokens are drafts of this shape. offer: the candidates. true: the tokens
    after the root. shape: number of nodes, negative for a chain.
    """
    tokens = offer.tokens[0]
    parents = offer.parents[0]
    scores = offer.scores[0]
    best = np.argsort(-scores, kind="stable")
    kept = set(range(len(tokens)) if shape < 0 else best[:shape].tolist())
    above = count = 0
    for token in true[: -shape if shape < 0 else None]:
        own = [number for number in best.tolist() if parents[number] == above and number in kept]
        found = [number for number in (own[:1] if shape < 0 else own) if tokens[number] == token]
        if not found:
            break
        above = found[0] + 1
        count = count + 1
    return count


def _row(name: str, reached: int, right: Sequence[int]) -> dict[str, object]:
    """Return one row. name: of the level. reached: how often. right: how often the guess of each rank was
    right.
    """
    shares = [round(one / max(reached, 1), 4) for one in right]
    return {"name": name, "reached": reached, "right by rank": shares, "right": round(sum(shares), 4)}


def _guesses(offer: Candidates, true: Sequence[int]) -> Iterator[list[int]]:
    """Yield the guesses below the true path, level by level, best first, as far as the path was extended."""
    tokens = offer.tokens[0].tolist()
    parents = offer.parents[0].tolist()
    above = 0
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
def record(
    decoder: Decoder, head: DraftHead, rows: Sequence[Row], counts: Counts | ShapeSteps, step: int, most: int
) -> None:
    """Draft a tree after every `step`-th token that the base wrote, at most `most` tokens of each text, and
    count the guesses.

    decoder: the base. head: drafts. rows: texts with learned tokens. counts: gets the trees.
    """
    pages = LONGEST // PAGE + 4
    stage = DecoderStage(decoder, pages, PAGE)
    shape = TreeShape(LEVELS - 1, K, MOST)
    for layer, weight in head.tap_slices().items():
        stage.tap(layer, weight)
    for number, row in enumerate(rows, 1):
        tokens = row.tokens.tolist()[:LONGEST]
        opening = Opening(number, len(tokens), decodes=False)
        chunk = PromptChunk(number, 0, tuple(tokens), True)
        features: Tensor | None = stage.run(Frame(1, number, (opening,), (chunk,))).fused
        assert features is not None, "the head taps nothing"
        written = row.learned.tolist()[: row.learned.tolist().index(True) + most]
        _follow(propose_with(head, shape, pages, PAGE), tokens, written, features, counts, step)
        stage.run(Frame(1, number, (), (), (number,)))
        if isinstance(counts, ShapeSteps):
            counts.end_text()


def _follow(
    drafter: Proposer,
    tokens: list[int],
    written: list[bool],
    features: Tensor,
    counts: Counts | ShapeSteps,
    step: int,
) -> None:
    """Let a drafter read one conversation in steps, with a tree after each.

    tokens: token ids. written: which of them the base wrote. features: [num_tokens, width] of the base.
        counts: gets the trees. step: tokens between two trees.
    """
    text = DraftSequence(Opening(1, 1, limit=1 << 20))
    done = 0
    drafter.open(text)
    for stop in range(written.index(True), min(len(tokens), len(written)) - LEVELS, step):
        feature_batch = FeatureBatch(1, done, tuple(tokens[done:stop]), tokens[stop], 1)
        text.observe(feature_batch)
        drafter.observe(Features(1, 1, (), (feature_batch,), (), features[done:stop]))
        offer = drafter.propose([text], LEVELS)
        done = stop
        if offer is not None and all(written[stop : stop + 1 + LEVELS]):
            counts.note(offer, tokens[stop + 1 : stop + 1 + LEVELS])


def measure(
    models: Models, texts: Path, most: int, tokens: int, shapes: Sequence[int], output: Path | None
) -> int:
    """Measure guesses by rank, or tokens per step of shapes, and publish the table; return the exit status 0.

    models: base and head. texts: file of conversations. most: conversations. tokens: of each answer at most.
        shapes: nodes of a chain, then of trees; empty: guesses by rank. output: the JSON file; None: only
        print.
    """
    assert models.draft is not None
    decoder = Decoder.load(models.base, None, torch.float32, "cpu")
    head = load_head(models.draft, models.base, torch.float32, "cpu")
    read = islice(rows_of(texts, Tokens(models.base), LONGEST, 0), most)
    rows = [row for row in read if row.has_targets]
    counts = ShapeSteps([-shapes[0], *shapes[1:]]) if shapes else Counts()
    record(decoder, head, rows, counts, 1 if shapes else STEP, tokens)
    settings: dict[str, object] = {"texts": texts.name, "conversations": len(rows)}
    if isinstance(counts, Counts):
        settings["trees"] = counts.reached[0]
    log = RowLog("ranks", settings, output, "name")
    for row in counts.rows():
        log.add(row)
    return 0
