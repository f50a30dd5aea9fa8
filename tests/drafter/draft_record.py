"""Records what a draft head proposes at every token of a model's own answers, for `far_ring.py`.

    python -m tests.drafter.draft_record MODEL HEAD int8 FILE.jsonl TOKENS drafts.npz

The base model answers the first turns of FILE's prompts token by token, greedily, on this CPU. After each
token the head grows a large candidate tree. The answer is known afterwards, so that any tree can be replayed:
a node would have been accepted exactly if its path from the root is what the model wrote next.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from specsot.core.frames import FeatureBatch, Features, Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import Tree
from specsot.members import TreeShape
from specsot.params import Message
from specsot_bench.reference_model import load_decoder
from specsot_bench.runners import ModelSet
from specsot_drafter.core.selection import Candidates, Floats
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import propose_with
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.stored_form import uses_packed_kernels
from specsot_worker.stage import DecoderStage

# Levels that are grown at every token. Single trees of up to 12 levels are compared; a chain of frames may
# look a little further ahead.
LEVELS: Final = 14
# Children of each node, and nodes of a level that are fed, as in the published trees.
TOP_K: Final = 10
# From this level on, fewer nodes are fed, because few of the candidates below are among the best. Untuned.
WIDE_LEVELS: Final = 6
# Nodes of these levels that are fed. Untuned.
NARROW_NODES: Final = 6
# Nodes that are kept of the candidates, the likeliest ones.
NODES: Final = 512
# Rows of a KV page.
PAGE_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The candidate tree that a head grew after one token, best node first; parents precede children.

    tokens:  Token id of each node, [n].
    parents: Number of each node's parent, [n]: 0 is the root, p + 1 is node p.
    depths:  Distance of each node from the root, [n], at least 1.
    scores:  Cumulative log-probability of each node, [n], falling.
    """

    tokens: NDArray[Any]
    parents: NDArray[Any]
    depths: NDArray[Any]
    scores: NDArray[Any]


@dataclass(frozen=True, slots=True)
class DraftedText:
    """An answer, and what the head would have drafted at each of its tokens.

    tokens: Token ids of the answer, greedily decoded.
    trees:  The tree that grows after each token, the first token included. The last token may have none.
    """

    tokens: tuple[int, ...]
    trees: tuple[DraftTree, ...]


@torch.inference_mode()
def record_answers(
    decoder: Decoder, head: DraftHead, prompts: Sequence[Sequence[int]], num_tokens: int, ends: Sequence[int]
) -> Iterator[DraftedText]:
    """Let the base model answer prompts, and yield every answer with the trees that the head proposed.

    decoder: The base model.
    head: The head that drafts.
    prompts: Token ids of each prompt.
    num_tokens: Maximum number of tokens of an answer.
    ends: Token ids that end an answer.

    The tree after the last token is recorded, too, unless that token ends the answer.
    """
    longest = max(map(len, prompts)) + num_tokens
    pages = (longest + TOP_K * (LEVELS + 1)) // PAGE_ROWS + 4
    stage = DecoderStage(decoder, pages, PAGE_ROWS)
    for layer, weight in head.tap_slices().items():
        stage.tap(layer, weight)
    proposer = propose_with(head, TreeShape(LEVELS - 1, TOP_K, NODES), pages, PAGE_ROWS)
    for number, prompt in enumerate(prompts, 1):
        opening = Opening(number, len(prompt), limit=num_tokens + 1)
        sequence = DraftSequence(opening)
        proposer.open(sequence)
        answer = list[int]()
        trees = list[DraftTree]()
        start = 0
        frame = Frame(1, 1, (opening,), (PromptChunk(number, 0, tuple(prompt), final=True),))
        rows = tuple(prompt)
        while len(answer) < num_tokens:
            output = stage.run(frame)
            assert output.hidden is not None, "the whole model has a last stage"
            token = int(decoder.logits(output.hidden[-1:])[0].argmax())
            batch = FeatureBatch(number, start, rows, token, 1)
            sequence.observe(batch)
            proposer.observe(Features(1, 1, (), (batch,), (), output.fused))
            start += len(rows)
            answer.append(token)
            if token in ends:
                break
            candidates = proposer.propose([sequence], LEVELS, nodes_to_feed)
            assert candidates is not None, "the head has room for every answer"
            trees.append(tree_of(candidates))
            tree = TreeSegment(number, len(answer), start, (), Tree((token,), (0,)))
            frame, rows = Frame(1, len(answer) + 1, segments=(tree,)), (token,)
        stage.run(Frame(1, len(answer) + 2, closings=(number,)))
        proposer.close(number)
        yield DraftedText(tuple(answer), tuple(trees))


def nodes_to_feed(scores: Floats, depth: int) -> int:
    """Return how many nodes of a level the head feeds.

    scores: Cumulative log-probabilities of the level's best nodes; not used.
    depth: Distance of the level from the root, at least 1.
    """
    return TOP_K if depth < WIDE_LEVELS else NARROW_NODES


def tree_of(candidates: Candidates) -> DraftTree:
    """Return the likeliest NODES candidates of one tree, best first.

    candidates: Candidates of one tree, [1, n].

    A parent is never less likely than its children and comes first among equals, so that it precedes them.
    """
    best = np.argsort(-candidates.scores[0], kind="stable")[:NODES]
    best = best[np.isfinite(candidates.scores[0][best])]
    places = np.zeros(candidates.tokens.shape[1] + 1, np.int32)
    places[best + 1] = np.arange(1, len(best) + 1)
    return DraftTree(
        candidates.tokens[0][best].astype(np.int32),
        places[candidates.parents[0][best]],
        candidates.depths[best].astype(np.int16),
        candidates.scores[0][best].astype(np.float32),
    )


def write_record(file: Path, texts: Sequence[DraftedText]) -> None:
    """Write answers and their trees to a compressed file of NumPy arrays.

    file: The file, replaced if it exists.
    texts: At least one answer.
    """
    trees = [tree for text in texts for tree in text.trees]
    arrays: dict[str, NDArray[Any]] = {
        "lengths": np.array([len(text.tokens) for text in texts]),
        "answers": np.concatenate([text.tokens for text in texts]),
        "trees": np.array([len(text.trees) for text in texts]),
        "nodes": np.array([len(tree.tokens) for tree in trees]),
    }
    for name in ("tokens", "parents", "depths", "scores"):
        arrays[name] = np.concatenate([getattr(tree, name) for tree in trees])
    np.savez_compressed(file, allow_pickle=False, **arrays)


def read_record(file: Path) -> tuple[DraftedText, ...]:
    """Return the answers and trees that `write_record` has written.

    file: The file. Raises OSError or ValueError if it cannot be read.
    """
    with np.load(file) as arrays:
        columns = [
            np.split(arrays[name], np.cumsum(arrays["nodes"])[:-1])
            for name in ("tokens", "parents", "depths", "scores")
        ]
        trees = [DraftTree(*parts) for parts in zip(*columns)]
        answers = np.split(arrays["answers"], np.cumsum(arrays["lengths"])[:-1])
        stops = np.cumsum(arrays["trees"]).tolist()
        counts = arrays["trees"].tolist()
    return tuple(
        DraftedText(tuple(answer.tolist()), tuple(trees[stop - count : stop]))
        for answer, stop, count in zip(answers, stops, counts)
    )


def make_record(file: Path, models: ModelSet, questions: Sequence[str], num_tokens: int) -> None:
    """Let a model answer questions, and write the answers with the trees of its head to a file, again after
    every answer. The head's matrices are held in the same form if the base's are held in integers.
    """
    assert models.head is not None
    prompts = Prompts(models.base, Text(models.base))
    decoder = load_decoder(models)
    form = models.stored_form
    kind = form if uses_packed_kernels(form, models.device) else None
    head = load_head(models.head, models.base, torch.float32, "cpu", quantization=kind)
    asked = [prompts.chat([Message("user", question)]) for question in questions]
    texts = list[DraftedText]()
    for text in record_answers(decoder, head, asked, num_tokens, decoder.config.eos):
        texts.append(text)
        write_record(file, texts)
        print(".", end="", file=sys.stderr, flush=True)


def main(model: str, head: str, kind: str, questions: str, tokens: str, output: str) -> None:
    numbers: dict[str, Any] = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    lines = Path(questions).read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["turns"][0] for line in lines if line.strip()]
    models = ModelSet(model=Path(model), head=Path(head), **numbers)
    make_record(Path(output), models, asked, int(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
