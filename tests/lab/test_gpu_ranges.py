"""`specsot bench gpu --gpus N`: its ring of real workers, here over two ranges on a CPU; its table."""

from __future__ import annotations

import pytest
import torch

from specsot.checkpoint.config import ModelConfig, make_config
from specsot.errors import InvalidRequest
from specsot_lab.bench.gpu_lanes import LaneRun
from specsot_lab.bench.gpu_ranges import RangedModel, Row, measure, measure_ring, page_of
from specsot_lab.bench.synthetic_models import SHAPES

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    little = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    little |= {"head_dim": 8, "intermediate_size": 48, "vocab_size": 1200}
    return make_config({**SHAPES["Llama-3.1-8B"], **little}, {}, tmp_path_factory.mktemp("tiny"))


async def test_ranges_write_what_one_writes_however_many_frames_fly(tiny: ModelConfig) -> None:
    rows: list[Row] = []
    one: dict[int, LaneRun] = {}
    for many in (1, 2):
        model = RangedModel("tiny", tiny, many, "cpu", torch.float32)
        rows += [row async for row in measure_ring(model, 20, one, (1, 16), steps=3)]
    kinds = [(row["what"], row.get("gpus"), row.get("rows"), row.get("in flight")) for row in rows]
    assert kinds == [
        ("ready", 1, None, None),
        *(("step of one stream", 1, size, None) for size in (1, 16)),
        ("ready", 2, None, None),
        *(("step of one stream", 2, size, None) for size in (1, 16)),
        *(("throughput", 2, size, flight) for size in (1, 16) for flight in (2, 3)),
    ]
    assert len(set(one[1].tokens)) > 1, "texts of one token would all be the same"
    assert [row["same tokens"] for row in rows if "same tokens" in row] == [
        f"{len(one[size].tokens)} of {len(one[size].tokens)}" for size in (1, 16)
    ]
    assert page_of(rows).splitlines()[-1].replace("|", " ").split()[:5] == [
        "tiny",
        "throughput",
        "2",
        "16",
        "3",
    ]


def test_fewer_gpus_than_asked_for() -> None:
    with pytest.raises(InvalidRequest, match="--gpus 99 needs as many CUDA devices"):
        measure(99, 8, None, None)
    with pytest.raises(InvalidRequest, match="grpc and direct, not zmq"):
        measure(2, 8, "zmq", None)
