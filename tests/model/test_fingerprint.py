"""Fingerprints: equal for the same model anywhere, different for any other, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specsot.checkpoint.fingerprint import fingerprint
from specsot.errors import ModelError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a config and one safetensors file of 300 kB."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    header = json.dumps({"a": {"dtype": "U8", "shape": [300000], "data_offsets": [0, 300000]}}).encode()
    data = bytes(range(250)) * 1200
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


def test_a_copy_elsewhere_has_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(model)
    assert len(fingerprint(model)) == 16


def test_what_says_nothing_of_the_weights_does_not_count(model: Path) -> None:
    before = fingerprint(model)
    (model / "config.json").write_text(
        '{"hidden_size": 8, "model_type": "llama", "transformers_version": "9"}'
    )
    assert fingerprint(model) == before


@pytest.mark.parametrize("place", [10, 5000, -1])
def test_another_byte_at_either_end_is_another_model(model: Path, place: int) -> None:
    before, path = fingerprint(model), model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert fingerprint(model) != before


def test_a_layer_trained_further_is_another_model(tmp_path: Path) -> None:
    """Deep inside a big file, far from either end."""
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(5)]
    size, before = 100_000, ""
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [size], "data_offsets": [size * at, size * (at + 1)]}
            for at, name in enumerate(names)
        }
        | {"__metadata__": {"format": "pt"}}
    ).encode()
    (tmp_path / "config.json").write_text("{}")
    for layer in (None, 1, 2, 3):
        data = bytearray(size * len(names))
        if layer is not None:
            data[size * layer : size * (layer + 1)] = b"\x01" * size
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        assert fingerprint(tmp_path) != before
        before = fingerprint(tmp_path)


def test_another_config_or_file_name_is_another_model(model: Path) -> None:
    before = fingerprint(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    renamed = fingerprint(model)
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 9}')
    assert len({before, renamed, fingerprint(model)}) == 3


def test_what_is_missing_or_broken_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent: no such model directory"):
        fingerprint(tmp_path / "absent")
    for broken in (b"", b"abc", b"\xff" * 20):
        (model / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
            fingerprint(model)
    for header in (b"{", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [-9]}}'):
        (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors header"):
            fingerprint(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weight files"):
        fingerprint(model)


@pytest.mark.processes
def test_torch_is_never_imported() -> None:
    modules = "specsot.checkpoint.fingerprint, specsot.checkpoint.config"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
