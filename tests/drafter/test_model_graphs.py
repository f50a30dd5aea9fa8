"""Drafts of a small language model in graphs are those that it makes kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specsot.checkpoint.config import read_config
from specsot.core.frames import FeatureBatch
from specsot.drafting import DraftOptions
from specsot.params import Window
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.memory import beam_graph_bytes
from specsot_drafter.proposers import lm
from specsot_drafter.proposers.lm import LanguageModelProposer, beam_shape, can_capture_beam
from specsot_model.cuda_graphs import Captured, GraphCapture, Work
from specsot_model.decoder import Decoder
from tests.drafter.ring import opening
from tests.drafter.test_descent import later
from tests.model.test_steps import Fused, Plain
from tests.model.tiny import write_model

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KIND = torch.float16  # what no library packs on a CPU
PAGE, HEADS = 4, 2 if DEVICE == "cuda" else 1
FORMS = {
    "linear": DraftOptions("linear", depth=3),
    "tree": DraftOptions("tree", depth=3, breadth=2, nodes=4),
    "pruned": DraftOptions("pruned", depth=3 if DEVICE == "cuda" else 2, breadth=2, nodes=6, threshold=0.1),
}
WINDOW = Window(sinks=2, recent=16)
# On a CPU kernels are interpreted, which takes seconds for every pass.
PROMPTS, MORE = ((26, 2), (0, 2, 6)) if DEVICE == "cuda" else ((26,), (0, 2))
CASES = [("llama", "linear", WINDOW), ("gpt_neox", "tree", None), ("gpt_neox", "pruned", WINDOW)]


@torch.inference_mode()
def drafts(
    decoder: Decoder, form: DraftOptions, window: Window | None, graphs: bool
) -> list[list[dict[tuple[int, ...], float]]]:
    """Of all texts together; each goes on by two tokens, one as drafted, then by more than graphs feed."""
    capture = GraphCapture() if DEVICE == "cuda" else later
    head, texts = DecoderHead(decoder, 90, 64), DraftSequences(None)
    drafter = LanguageModelProposer(head, beam_shape(form), 30, PAGE, capture if graphs else None)
    seeded, found = torch.Generator().manual_seed(3), list[list[dict[tuple[int, ...], float]]]()
    pair = [texts.open(opening(n, rows, limit=60, window=window)) for n, rows in enumerate(PROMPTS)]
    for text in pair:
        drafter.open(text)
    for more in MORE:
        for row, text in enumerate(pair):
            written = torch.randint(90, (more or text.opening.prompt + 1,), generator=seeded).tolist()
            if more == 2:  # one token as the best chain says
                written[0] = max(found[-1][row].items(), key=lambda one: (len(one[0]) == 1, one[1]))[0][0]
            fed = (*text.tokens[text.committed :], *written[:-1])
            texts.observe([FeatureBatch(text.id, text.committed, fed, written[-1], 1)])
        offer = drafter.propose(pair, 2 if more == 6 else 3)
        assert offer is not None
        found.append([paths(offer, row) for row in range(len(pair))])
    for text in pair:
        drafter.close(text.id)
    assert drafter.free_pages == 30
    return found


def paths(offer: Candidates, row: int) -> dict[tuple[int, ...], float]:
    """Every path from the root, with its log-probability."""
    known: list[tuple[int, ...]] = [()]
    for token, parent in zip(offer.tokens[row].tolist(), offer.parents[row].tolist()):
        known.append((*known[parent], token))
    scores: Sequence[float] = offer.scores[row].tolist()
    return {path: score for path, score in zip(known[1:], scores) if score > -torch.inf}


@pytest.mark.parametrize(("kind", "form", "window"), CASES if DEVICE == "cuda" else CASES[2:])
def test_a_graph_drafts_what_is_drafted_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, form: str, window: Window | None
) -> None:
    """The prompts are fed in graphs as well: `compute_rows`, which feeds them without, is removed before."""
    layers = 1 if form == "pruned" else 2
    write_model(tmp_path, kind, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=1)
    plain, fused = (each.load(tmp_path, None, KIND, DEVICE) for each in (Plain, Fused))
    assert (plain.capturable, fused.capturable) == (False, True)
    wanted = drafts(plain, FORMS[form], window, False)
    monkeypatch.delattr(lm, "compute_rows")
    for one, other in zip(drafts(fused, FORMS[form], window, True), wanted, strict=True):
        for left, right in zip(one, other, strict=True):
            assert list(left) == list(right)
            assert list(left.values()) == pytest.approx(list(right.values()), abs=0.05)


def test_levels_with_too_many_candidates_grow_without() -> None:
    assert can_capture_beam(beam_shape(DraftOptions(depth=1)))
    assert can_capture_beam(beam_shape(DraftOptions("tree", depth=5, breadth=2)))
    assert not can_capture_beam(beam_shape(DraftOptions("tree", depth=5, breadth=5, nodes=500)))


def test_the_graphs_of_prompts_are_counted_where_trees_have_none(tmp_path: Path) -> None:
    """The graphs that feed prompts are captured even if the levels of the trees are too large for graphs."""
    write_model(tmp_path, "gpt_neox", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    config = read_config(tmp_path)
    wide = beam_shape(DraftOptions("tree", depth=5, breadth=5, nodes=500))
    assert not can_capture_beam(wide)
    head = DecoderHead(Fused.load(tmp_path, None, KIND, DEVICE), 90, 64)
    drafter = LanguageModelProposer(head, wide, 8, PAGE, GraphCapture() if DEVICE == "cuda" else _uncaptured)
    assert drafter._graphs is None
    assert drafter._prompts is not None
    assert beam_graph_bytes(config, 2, wide) > 0


def _uncaptured(work: Work) -> Captured:
    """Return a graph that does nothing, so that no pass is interpreted when the proposer is created."""
    return lambda: None, (torch.empty(0), None)
