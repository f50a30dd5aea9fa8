"""Weight files: lazily read, and one clear line for each way to be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specsot.errors import ModelError
from specsot.members import Range
from specsot_model.decoder import Decoder
from specsot_model.weights import HeldWeights, WeightFiles
from tests.model.tiny import write_model


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors a [2, 3] and b [4] in two files."""
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def refusal(directory: Path, name: str = "a") -> str:
    with pytest.raises(ModelError) as caught:
        WeightFiles(directory).tensor(name, torch.float32, "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_of_all_shards_by_name(sharded: Path) -> None:
    files = WeightFiles(sharded)
    assert sorted(files.names()) == ["a", "b"]
    assert files.shape("b") == (4,)
    assert files.tensor("b", torch.float32, "cpu").dtype == torch.float32
    assert files.tensor("a", torch.float32, "cpu")[1].tolist() == [3, 4, 5]
    assert "a" in files
    assert "c" not in files


def test_a_shard_that_is_not_needed_is_not_opened(sharded: Path) -> None:
    (sharded / "two.safetensors").write_bytes(b"not tensors")
    files = WeightFiles(sharded)
    assert files.shape("a") == (2, 3)
    with pytest.raises(ModelError, match=r"two\.safetensors"):
        files.shape("b")


def test_a_single_file_lists_itself(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert WeightFiles(tmp_path).names() == ("a",)


def test_broken_files_are_named(sharded: Path) -> None:
    whole = (sharded / "one.safetensors").read_bytes()
    (sharded / "one.safetensors").write_bytes(whole[:-8])
    assert str(sharded / "one.safetensors") in refusal(sharded)
    (sharded / "one.safetensors").write_bytes(b"")
    assert str(sharded / "one.safetensors") in refusal(sharded)
    (sharded / "one.safetensors").unlink()
    assert "no such file, but model.safetensors.index.json names it" in refusal(sharded)


def test_missing_tensors_are_named(sharded: Path) -> None:
    assert "no tensor c in the weight files" in refusal(sharded, "c")
    save_file({"other": torch.zeros(1)}, sharded / "one.safetensors")
    assert "one.safetensors: tensor a is missing" in refusal(sharded)


@pytest.mark.parametrize("files", [{"a": 1}, [], None, {"a": "../one.safetensors"}])
def test_a_strange_index_is_refused(sharded: Path, files: object) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert str(index) in refusal(sharded)


def test_no_weights_and_no_directory(tmp_path: Path) -> None:
    assert "no model.safetensors and no" in refusal(tmp_path)
    assert "no such model directory" in refusal(tmp_path / "absent")


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_only_when_asked_for(tmp_path: Path, zipped: bool) -> None:
    """In today's layout, and in that of torch before 1.6."""
    tensors = {"a": torch.ones(2, 2)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert "only pytorch_model.bin" in refusal(tmp_path)
    files = WeightFiles(tmp_path, allow_pickle_bin=True)
    assert files.names() == ("a",)
    assert files.shape("a") == (2, 2)
    assert files.tensor("a", torch.float16, "cpu").dtype == torch.float16


def test_pickles_that_are_more_than_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        WeightFiles(tmp_path, allow_pickle_bin=True)


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 57}))
    with pytest.raises(ModelError) as caught:
        Decoder.load(tmp_path, Range(0, 3), torch.float32, "cpu")
    assert "model.layers.0.mlp.gate_proj.weight has shape [56, 32]" in str(caught.value)
    assert "the config asks for [57, 32]" in str(caught.value)


def test_tensors_in_memory_are_shared_unless_converted() -> None:
    tensor = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    held = HeldWeights({"a": tensor}, "my model")
    found = held.expect("a", (2, 3), torch.float32, "cpu")
    assert found.data_ptr() == tensor.data_ptr()
    assert not found.requires_grad
    assert held.tensor("a", torch.bfloat16, "cpu").dtype == torch.bfloat16
    assert (held.names(), "a" in held, "b" in held) == (("a",), True, False)


def test_what_is_not_in_memory_is_named() -> None:
    held = HeldWeights({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}, "my model")
    for name, said in (("c", "no tensor c"), ("b", "b is on no device")):
        with pytest.raises(ModelError, match=f"my model: {said}"):
            held.tensor(name, torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"my model: a has shape \[2\], the config asks for \[3\]"):
        held.expect("a", (3,), torch.float32, "cpu")


def test_pages_of_a_file_do_not_stay_mapped_alongside_their_copies(tmp_path: Path) -> None:
    tensors = {name: torch.full((1 << 20,), float(n)) for n, name in enumerate("abc")}
    save_file(tensors, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, remap_bytes=6 << 20)
    kept = files.tensor("a", torch.bfloat16, "cpu")
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    read = [files.tensor(name, torch.bfloat16, "cpu") for name in "bc"]
    assert [one[0].item() for one in (kept, *read)] == [0, 1, 2]
    read.append(files.tensor("b", torch.bfloat16, "cpu"))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
