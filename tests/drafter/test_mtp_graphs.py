"""Trees of an MTP layer that grow in one graph are those that grow level by level."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specsot.checkpoint.config import read_config
from specsot.checkpoint.mtp import block_config, require_mtp
from specsot.members import Range
from specsot_drafter.eagle_kv import compute_rows
from specsot_drafter.growth import TreeGrowth
from specsot_drafter.heads.fused import graph_head
from specsot_drafter.heads.mtp import MtpHead, MtpParts
from specsot_drafter.overlap.graph_growth import GraphInput, TreeGraphs
from specsot_model.cuda_graphs import GraphCapture
from specsot_model.decoder import Decoder
from specsot_model.layers import fetch_final_norm
from specsot_model.weights import Fetch, WeightFiles
from tests.drafter.mtp import write_pair
from tests.drafter.test_descent import DEVICE, KIND, LEVELS, TEXTS, TREES, K, later, remembering
from tests.model.test_steps import Fused, Plain
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.growing import grow


def load(directory: Path, kind: type[Decoder]) -> MtpHead:
    """The layer, whose block runs as this kind of decoder."""
    config, files = read_config(directory), WeightFiles(directory)
    names = require_mtp(files.names(), config, directory)
    block = kind(block_config(config, names, files.names()), files, Range(0, 1), KIND, torch.device(DEVICE))
    fetch = Fetch(files, KIND, DEVICE)
    return MtpHead(block, MtpParts.fetch(fetch, names, config), config, fetch_final_norm(fetch, config))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5_text"])
@torch.inference_mode()
def test_one_graph_grows_what_levels_grow(tmp_path: Path, kind: str) -> None:
    write_pair(tmp_path, kind, num_attention_heads=2, num_key_value_heads=1)
    plain, fused = (load(tmp_path, each) for each in (Plain, Fused))
    assert (graph_head(plain), graph_head(fused)) == (None, fused)
    (memory, due), (other, same) = (remembering(head, TEXTS) for head in (fused, plain))
    capture = GraphCapture() if DEVICE == "cuda" else later
    graphs = TreeGraphs(fused, memory, K, LEVELS, capture, grow, (TREES,))
    rooms, same_rooms = (
        [pages.reserve_tree(one.sequence, one.stop, (LEVELS - 1) * K) for one in rows]
        for pages, rows in ((memory, due), (other, same))
    )
    wanted = TreeGrowth(plain, other.kv, same_rooms, K).run(compute_rows(plain, other, same), LEVELS)  # type: ignore[arg-type]
    found = there(graphs.run([GraphInput(*each) for each in zip(due, rooms)], LEVELS))  # type: ignore[arg-type]
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.parents.tolist() == wanted.parents.tolist()
    torch.testing.assert_close(torch.tensor(found.scores), torch.tensor(wanted.scores), atol=2e-2, rtol=2e-2)
