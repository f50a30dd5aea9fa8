"""Heads and small models whose matrices are held in fewer bits than they compute in."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("numba") is None:
    pytest.skip("needs numba", allow_module_level=True)

import torch

from specsot.checkpoint.config import read_config
from specsot.errors import InvalidRequest
from specsot.members import Quantization
from specsot.service.options import DraftModelOptions
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.checkpoint import Checkpoint
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.heads.eagle import Eagle3Head
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import DraftLoader, make_backends
from specsot_drafter.memory import eagle_memory, small_model_bytes
from specsot_master.core.ring.ring_state import RingConfig
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.linear import Packed
from specsot_model.memory_fit import WeightForm, drafter_bytes
from specsot_model.weights import WeightFiles
from tests.model.tiny import ShortRows
from tests.models import Shape, write_base, write_head


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_base(folder / "base"), write_head(folder / "head")


def test_a_head_in_fewer_bits_predicts_nearly_the_same(models: tuple[Path, Path]) -> None:
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
    whole, eight, four = (drafter_bytes(files, WeightForm(4, kind)) for kind in (None, "int8", "int4"))
    assert whole > eight > four > 0.1 * whole


def counted(head: Path, base: Path, kind: Quantization | None) -> int:
    """Bytes of a row, by shapes alone."""
    given = (
        Checkpoint.open(head, False),
        WeightFiles(base),
        read_config(base),
        WeightForm.on_device("cpu", 4, kind),
    )
    return eagle_memory(*given, RingConfig().shape, kernels=False).row


def test_rows_that_no_kernel_of_few_bits_reads_count_as_they_are_kept(tmp_path: Path) -> None:
    """A head that is not in few bits, and one whose positions are stretched."""
    base, folder = write_base(tmp_path / "base"), write_head(tmp_path / "head", drafts=128)
    whole = load_head(folder, base, torch.float32, "cpu")
    assert counted(folder, base, None) == whole.row_bytes
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    stretched = load_head(folder, base, torch.float32, "cpu", quantization="int8")
    assert counted(folder, base, "int8") == stretched.row_bytes == whole.row_bytes


@pytest.mark.parametrize("kind", ["int8", "int4"])
@torch.inference_mode()
def test_a_kernel_drafts_what_its_layers_would(tmp_path: Path, kind: Quantization) -> None:
    base, folder = write_base(tmp_path / "base"), write_head(tmp_path / "head", drafts=128)
    head = load_head(folder, base, torch.float32, "cpu", quantization=kind)
    assert isinstance(head, Eagle3Head)
    seeded = torch.Generator().manual_seed(0)
    tokens, features = torch.randint(200, (2, 9), generator=seeded), torch.randn(9, 64, generator=seeded)
    places = torch.arange(18).view(9, 2)[:, 0], torch.arange(27).view(9, 3)[:, 0]  # columns of larger tables

    def run(asked: list[int], kv: KVPages) -> torch.Tensor:
        numbers = torch.tensor(asked)
        pages = [RowSpan(1, 3 * row, 1, (0,)) for row in asked]
        return head.forward(tokens[0], features, HeadRows(*places, head.plan(pages, 32), kv, numbers))

    few, every = run([2, 8], head.make_kv(1, 32)), run(list(range(9)), head.make_kv(1, 32))
    assert head.row_bytes == 2 * 2 * head.kv_heads * head.head_dim + 4 * 64
    assert counted(folder, base, kind) == head.row_bytes
    assert head.decoder.packed is not None
    assert torch.equal(few, every[[2, 8]])
    best = head.choose(every, 7)
    assert best is not None
    chances, wanted = head.log_probs(every).topk(7)
    torch.testing.assert_close(best[0], chances)
    assert torch.equal(best[1], head.to_target(wanted))
    head.decoder.packed = head.decoder.first.packed = None
    kept = ShortRows(1, 1, 32, head.kv_heads, head.head_dim, torch.float32, "cpu")
    torch.testing.assert_close(few, run([2, 8], kept), rtol=1e-3, atol=1e-3)


def small_model_of(folder: Path) -> DecoderHead:
    """The small model as a drafter of this base loads it on a CPU by default, beside int8."""
    options = DraftModelOptions(folder, drafter="model", draft_model=folder, quantization="int8")
    head = make_backends(options)["model"].model
    assert isinstance(head, DecoderHead)
    return head


@torch.inference_mode()
def test_a_small_model_drafts_in_4_bits_with_its_lm_head(tmp_path: Path) -> None:
    head = small_model_of(write_base(tmp_path / "small", Shape(vocabulary=208)))
    outputs = torch.randn(6, head.hidden, generator=torch.Generator().manual_seed(0))
    best = head.choose(outputs, 5)
    assert best is not None
    chances, tokens = head.log_probs(outputs).topk(5)
    torch.testing.assert_close(best[0], chances)
    assert torch.equal(best[1], tokens)
    parts = head.decoder.edges
    product, table = parts.lm_head().multiply, parts.embedding()
    assert isinstance(product, Packed)
    assert isinstance(table, Packed)
    assert (product.weight.bits, table.weight.bits) == (4, 8)
    columns = torch.eye(head.hidden)
    assert (product(columns).T - table.rows(torch.arange(208))).abs().max() < 0.3


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_small_model_drafts_ids_up_to_the_highest_with_text_that_has_occurred(
    tmp_path: Path, kind: Quantization
) -> None:
    folder = write_base(tmp_path / "small", Shape(vocabulary=208))
    spelled = [b"a"] * 200 + [None] * 8
    decoder = Decoder.load(folder, None, torch.float32, "cpu", quantization=kind, short_lm_head=True)
    head = DecoderHead(decoder, 208, 512, spelled)
    outputs = torch.randn(6, head.hidden, generator=torch.Generator().manual_seed(0))
    for tokens, count in (([3, 207, 40], 48), ([7], 48), ([199], 208)):
        head.include(tokens)
        best = head.choose(outputs, 5)
        assert best is not None
        chances, ids = torch.log_softmax(head.logits(outputs)[:, :count], -1).topk(5)
        assert torch.equal(best[1], ids)
        torch.testing.assert_close(best[0], chances)


def test_a_small_model_of_sizes_that_4_bits_cannot_hold_has_8(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "small", Shape(inner=72))
    small = small_model_of(folder)
    product = small.decoder.edges.lm_head().multiply
    assert isinstance(product, Packed)
    assert product.weight.bits == 8
    in_8_bits, in_4_bits = (
        small_model_bytes(WeightFiles(folder), read_config(folder), WeightForm.on_device("cpu", 4, kind))
        for kind in ("int8", "int4")
    )
    assert in_4_bits == in_8_bits


def test_the_memory_of_a_small_model_counts_its_second_table(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "small")
    files, config = WeightFiles(folder), read_config(folder)
    held = WeightForm.on_device("cpu", 4, "int4")
    assert small_model_bytes(files, config, held) > drafter_bytes(files, held)
    untied = replace(config, tied=False)
    assert small_model_bytes(files, untied, held) == drafter_bytes(files, held)


def test_alongside_a_base_in_few_bits_the_drafter_uses_8(models: tuple[Path, Path]) -> None:
    given = DraftModelOptions(models[0], draft_model=models[1], quantization="int4")
    assert given.drafter_quantization == "int8"
    assert replace(given, drafter="model").drafter_quantization == "int4"
    assert replace(given, drafter="model", quantization="none").drafter_quantization is None
    assert replace(given, draft_quantization="int4").drafter_quantization == "int4"
    assert replace(given, quantization="fp8").drafter_quantization is None
    assert replace(given, device="cuda").drafter_quantization is None


def test_what_a_drafter_cannot_hold_is_refused_before_anything_is_loaded(models: tuple[Path, Path]) -> None:
    base, head = models
    options = DraftModelOptions(base, draft_model=head, draft_quantization="int3")
    with pytest.raises(InvalidRequest, match=r"quantization must be one of .*, got 'int3'"):
        DraftLoader(options, "d")
