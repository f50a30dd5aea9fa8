"""Heads and small models whose matrices are held in fewer bits than they compute in."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
if find_spec("numba") is None:
    pytest.skip("needs numba", allow_module_level=True)

import torch

from specsot.errors import InvalidRequest
from specsot.model.memory_fit import WeightForm, drafts_of
from specsot.model.weights import WeightFiles
from specsot.service.options import DraftModelOptions
from specsot_drafter.heads.eagle import Eagle3Head
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import DraftLoader
from tests.models import write_base, write_head

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_base(folder / "base"), write_head(folder / "head")


def test_a_head_in_fewer_bits_guesses_nearly_the_same(models: tuple[Path, Path]) -> None:
    base, head = models
    whole = load_head(head, base, torch.float32, "cpu")
    outputs = torch.randn(40, whole.hidden, generator=torch.Generator().manual_seed(0))
    wanted = whole.log_probs(outputs)
    for kind in ("int8", "int4"):
        rounded = load_head(head, base, torch.float32, "cpu", quantization=kind)
        assert isinstance(rounded, Eagle3Head)
        layer = rounded.decoder.first
        assert all(each.weight is None for each in (layer.qkv, layer.out, layer.gate_up, layer.down))
        found = rounded.log_probs(outputs)
        assert not torch.equal(found, wanted)
        assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9
        for tap, part in whole.tap_slices().items():
            assert torch.equal(rounded.tap_slices()[tap], part), "what stages apply is not rounded"


def test_a_head_in_fewer_bits_takes_less(models: tuple[Path, Path]) -> None:
    files = WeightFiles(models[1])
    whole, eight, four = (drafts_of(files, WeightForm(4, kind)) for kind in (None, "int8", "int4"))
    assert whole > eight > four > 0.1 * whole


def test_what_a_drafter_cannot_hold_is_refused_before_anything_is_loaded(models: tuple[Path, Path]) -> None:
    base, head = models
    options = DraftModelOptions(base, draft_model=head, draft_quantization="int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match=r"quantization must be one of .*, got 'int3'"):
        DraftLoader(options, "d")
