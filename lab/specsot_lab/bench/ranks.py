"""`specsot bench ranks`: the tokens per step of a chain and of trees of a head's likeliest drafts, on answers
that its base model wrote.

The base model reads each conversation once. A chain and a tree grow after every token, each as the drafter
would grow it alone; then the steps of each shape are replayed as if it had been drafted in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from specsot.core.frames import FeatureBatch, Features, Frame, Opening, PromptChunk
from specsot.members import TreeShape
from specsot.service.options import Dtype
from specsot_app.fleet.options import Models
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.results import publish
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import propose_with
from specsot_drafter.proposers import Proposer
from specsot_lab.eval.core.aspect_table import interval_of
from specsot_lab.train.rows import Row
from specsot_lab.train.text_files import rows_of
from specsot_master.text import Text as Tokens
from specsot_model.decoder import Decoder
from specsot_model.linear import resolve_dtype
from specsot_worker.stage import DecoderStage

# Levels of the published trees. A longer chain has as many levels as drafts.
LEVELS: Final = 8
# Children of a node in the published trees.
TOP_K: Final = 10
# Rows of a KV page.
PAGE: Final = 64
# Maximum number of tokens of a conversation.
MAX_TOKENS: Final = 512


class ShapeSteps:
    """The tokens per step of shapes: of a chain, and of trees of the likeliest nodes.

    The tokens that follow are known, so a draft is accepted exactly if the ring would accept it.

    tree_shapes: What is grown after each token: the chain, and then, if there are trees, the tree of which
        they are the likeliest nodes.
    levels: Number of tokens after each token that are looked up.
    """

    def __init__(self, chain: int, trees: Sequence[int]) -> None:
        """Start without counts.

        chain: Number of drafts of the chain.
        trees: The number of drafts of each tree. Repeated numbers count once.

        The chain is grown alone, because a tree need not hold the likeliest draft after every draft: the most
        likely nodes of a tree may all be near its root.
        """
        self.levels = max(LEVELS, chain)
        chain_shape = TreeShape(chain - 1, 1, chain + 1)
        tree_shapes = [TreeShape(self.levels - 1, TOP_K, max(trees) + 1)] if trees else []
        self.tree_shapes = (chain_shape, *tree_shapes)
        # By the name of a shape: its number of drafts, and which of the grown trees has them.
        self._shapes = {f"chain of {chain}": (chain, 0)} | {f"tree of {count}": (count, 1) for count in trees}
        # By name: how many drafts would have been accepted after each token of the current sequence.
        self._accepted_after: dict[str, list[int]] = {name: [] for name in self._shapes}
        # By name: tokens and steps of each sequence that has ended.
        self._totals: dict[str, list[tuple[int, int]]] = {name: [] for name in self._shapes}
        # By name: the number of steps in which each number of drafts was accepted.
        self._depths: dict[str, list[int]] = {name: [0] * (self.levels + 1) for name in self._shapes}

    def record(self, trees: Sequence[Candidates], next_tokens: Sequence[int]) -> None:
        """Record how many drafts of each shape would have been accepted after one token.

        trees: The candidates of what was grown after this token, in the order of `tree_shapes`, [1, n] each.
        next_tokens: The tokens that really follow the root.
        """
        for name, (count, number) in self._shapes.items():
            self._accepted_after[name].append(_accepted(trees[number], next_tokens, count))

    def end_sequence(self) -> None:
        """Count the steps of each shape over the current sequence, then start the next one. A sequence
        without tokens is not counted. For example:

            # accepted after each token [2 0 1 0] -> steps at tokens 0 and 3, 4 tokens in 2 steps

        The accepted drafts of the last step may exceed the tokens that were recorded; they count in full.
        """
        for name, accepted in self._accepted_after.items():
            position = steps = 0
            while position < len(accepted):
                self._depths[name][accepted[position]] += 1
                position = position + accepted[position] + 1
                steps = steps + 1
            if steps:
                self._totals[name].append((position, steps))
            accepted.clear()

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row for each shape, with its tokens per step over all sequences. At least one sequence must
        have been counted.

        A row has the entries "name", "texts" (sequences), "steps", "tokens a step", "95 %" (the interval over
        sequences, weighted by their steps), and "accepted where reached": for each depth, the fraction of
        steps that accepted a draft of that depth among those that accepted all above it. Depths that were
        never reached are left out. Raises ValueError if no sequence was counted.
        """
        for name, totals in self._totals.items():
            tokens, steps = (sum(column) for column in zip(*totals))
            means = [num_tokens / num_steps for num_tokens, num_steps in totals]
            weights = [num_steps for _, num_steps in totals]
            row: dict[str, object] = {
                "name": name,
                "texts": len(totals),
                "steps": steps,
                "tokens a step": round(tokens / steps, 3),
            }
            row |= {"95 %": [round(bound, 2) for bound in interval_of(means, weights)]}
            reached = [sum(self._depths[name][depth:]) for depth in range(self.levels + 1)]
            shares = [
                round(deeper_count / shallower_count, 3)
                for shallower_count, deeper_count in pairwise(reached)
                if shallower_count
            ]
            yield row | {"accepted where reached": shares}


def _accepted(candidates: Candidates, next_tokens: Sequence[int], count: int) -> int:
    """Return how many of the next tokens are accepted drafts of a tree; 0 if the first one is not.

    candidates: The candidates of a tree, [1, n].
    next_tokens: The tokens that really follow the root.
    count: The number of drafts that the tree keeps, the likeliest ones.

    Drafts whose parent is not selected cannot be accepted.
    """
    tokens = candidates.tokens[0]
    parents = candidates.parents[0]
    selected = np.argsort(-candidates.scores[0], kind="stable")[:count].tolist()
    parent = num_accepted = 0
    for token in next_tokens:
        matching = [number for number in selected if parents[number] == parent and tokens[number] == token]
        if not matching:
            break
        parent = matching[0] + 1
        num_accepted = num_accepted + 1
    return num_accepted


@torch.inference_mode()
def record_trees(
    decoder: Decoder,
    head: DraftHead,
    rows: Sequence[Row],
    counts: ShapeSteps,
    max_tokens: int,
) -> None:
    """Grow trees over conversations, and count their drafts.

    decoder: The base model.
    head: The head that drafts.
    rows: The conversations, each with the tokens that the base model wrote.
    counts: Gets the trees.
    max_tokens: Number of tokens, from the first answer on, that are read of each conversation.

    A conversation is cut to its first MAX_TOKENS tokens. Raises ValueError for a conversation in which the
    base model wrote nothing, and AssertionError if the head reads no features.
    """
    pages = MAX_TOKENS // PAGE + 4
    stage = DecoderStage(decoder, pages, PAGE)
    drafters = [propose_with(head, shape, pages, PAGE) for shape in counts.tree_shapes]
    for layer, weight in head.tap_slices().items():
        stage.tap(layer, weight)
    for number, row in enumerate(rows, 1):
        tokens = row.tokens.tolist()[:MAX_TOKENS]
        opening = Opening(number, len(tokens), decodes=False)
        chunk = PromptChunk(number, 0, tuple(tokens), True)
        features: Tensor | None = stage.run(Frame(1, number, (opening,), (chunk,))).fused
        assert features is not None, "the head reads no features"
        written = row.learned.tolist()[: row.learned.tolist().index(True) + max_tokens]
        _follow(number, drafters, tokens, written, features, counts)
        stage.run(Frame(1, number, (), (), (number,)))
        counts.end_sequence()


def _follow(
    number: int,
    drafters: Sequence[Proposer],
    tokens: list[int],
    written: list[bool],
    features: Tensor,
    counts: ShapeSteps,
) -> None:
    """Let drafters read one conversation, and grow their trees after every token. Trees count only if the
    base model wrote all of the `levels` + 1 tokens after it, where `levels` is that of `counts`.

    number: Number of the conversation, the drafters' id of its sequence.
    drafters: The drafters, in the order of `tree_shapes`. They have not read anything of the conversation,
        and have forgotten it afterwards.
    tokens: Token ids of the conversation.
    written: For each token, whether the base model wrote it.
    features: Features of the base model, [num_tokens, width].
    counts: Gets the trees.

    The first tree grows at the first token that the base model wrote. Positions with fewer than `levels`
    tokens after them have no tree. Trees are not counted if a drafter has no candidates.
    """
    sequence = DraftSequence(Opening(number, 1, limit=1 << 20))
    num_read = 0
    for drafter in drafters:
        drafter.open(sequence)
    for end in range(written.index(True), min(len(tokens), len(written)) - counts.levels):
        feature_batch = FeatureBatch(number, num_read, tuple(tokens[num_read:end]), tokens[end], 1)
        sequence.observe(feature_batch)
        message = Features(1, 1, (), (feature_batch,), (), features[num_read:end])
        for drafter in drafters:
            drafter.observe(message)
        offers = [
            drafter.propose([sequence], shape.depth + 1)
            for drafter, shape in zip(drafters, counts.tree_shapes)
        ]
        trees = [candidates for candidates in offers if candidates is not None]
        num_read = end
        if len(trees) == len(drafters) and all(written[end : end + 1 + counts.levels]):
            counts.record(trees, tokens[end + 1 : end + 1 + counts.levels])
    for drafter in drafters:
        drafter.close(number)


def measure(
    models: Models,
    texts: Path,
    max_conversations: int,
    tokens: int,
    shapes: Sequence[int],
    precision: tuple[Dtype, str],
    output: Path | None,
) -> int:
    """Measure tokens per step of shapes, and publish the table. Return the exit status 0.

    models: Directories of the base model and of the head, which must exist.
    texts: File of conversations.
    max_conversations: Maximum number of conversations that are read.
    tokens: Maximum number of tokens that are read, from the first answer of a conversation on.
    shapes: Drafts of a chain, then of each tree; at least the chain.
    precision: Data type and torch device of both models.
    output: The JSON file; None: the table is only printed.

    Conversations in which the base model wrote nothing are left out. Raises ModelError for a file of
    conversations or a model that cannot be read, HeadMismatch for a head that does not fit.
    """
    assert models.draft is not None
    device = precision[1]
    dtype = resolve_dtype(*precision)
    decoder = Decoder.load(models.base, None, dtype, device)
    head = load_head(models.draft, models.base, dtype, device)
    conversations = islice(rows_of(texts, Tokens(models.base), MAX_TOKENS, 0), max_conversations)
    rows = [row for row in conversations if row.has_targets]
    counts = ShapeSteps(shapes[0], shapes[1:])
    record_trees(decoder, head, rows, counts, tokens)
    settings = {"texts": texts.name, "conversations": len(rows)}
    measured = list(counts.rows())
    publish("ranks", settings, measured, markdown(COLUMNS, measured), output)
    return 0


# The columns of the table.
COLUMNS: Final = (
    text("shape", "name"),
    figure("texts", "texts", 0),
    figure("steps", "steps", 0),
    figure("tokens a step", "tokens a step", 3),
    Column("95 %", lambda row: "{} to {}".format(*row["95 %"])),
    Column("accepted where reached", lambda row: ", ".join(map(str, row["accepted where reached"]))),
)
