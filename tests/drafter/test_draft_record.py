"""What a head proposes at every token is recorded: a file that says the same when it is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specsot_app.fleet.demo import small_pair
from tests.drafter.draft_record import main, read_record

pytestmark = pytest.mark.torch


def test_a_record_of_the_small_pair(tmp_path: Path) -> None:
    record, prompts = tmp_path / "drafts.npz", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["tides", "and why?"]}) + "\n")
    main(str(small_pair() / "base"), str(small_pair() / "eagle3"), "fp32", str(prompts), "12", str(record))
    (text,) = read_record(record)
    assert len(text.tokens) == 12
    assert len(text.trees) == 12
    for tree in text.trees:
        parents = [0.0, *tree.scores.tolist()]
        assert (tree.parents <= np.arange(len(tree.tokens))).all(), "parents come first"
        assert all(score <= parents[parent] for score, parent in zip(tree.scores, tree.parents))
