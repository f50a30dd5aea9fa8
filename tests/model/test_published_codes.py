"""Weights that others quantized, run as they are by kernels: codes, products, ranges, what is chosen."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llvmlite import binding
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsot.errors import InvalidRequest, ModelError
from specsot.members import Quantization, Range
from specsot.service.options import ModelOptions
from specsot_model import fp8, stored_form
from specsot_model.decoder import Decoder
from specsot_model.decoding import Codes, codes_of
from specsot_model.fp8 import Fp8
from specsot_model.linear import Linear, Packed, describe_rounding, stored_bytes
from specsot_model.mlp import GatedMlp
from specsot_model.stored_form import as_published, published_of
from specsot_worker.loader import StageLoader
from tests.model.compressing import scheme_of, write_compressed
from tests.model.published import HERE as KEPT
from tests.model.test_published import PROMPT, SAID, SCHEMES, WIDE, published
from tests.model.test_quantization import rounded_rows
from tests.model.tiny import Ring

if find_spec("numba") is None:
    pytest.skip("needs numba", allow_module_level=True)
FORMS: dict[str, Quantization] = {
    "W8A8": "int8",
    "W8A16 rows": "int8",
    "bnb-int8": "int8",
    "W4A16": "int4",
    "W4A16 asymmetric": "int4",
    "awq": "int4",
    "gptq": "int4",
    "FP8": "fp8",
    "FP8 rows": "fp8",
}
ROWS = {"W8A16 rows": lambda: [scheme_of("W8A16", group_size=None, strategy="channel")]}
UP, DOWN, OUT = "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"


def written(name: str, directory: Path) -> Path:
    """A checkpoint of the format's own library."""
    if name in SAID:
        return KEPT / name
    write_compressed(directory, (SCHEMES | ROWS)[name](), **WIDE)
    return directory


def load(directory: Path, form: Quantization | None, *cuts: int) -> Ring:
    starts = zip((0, *cuts), cuts)
    ranges = [Range(first, last) for first, last in starts] or [None]
    return Ring.of([Decoder.load(directory, one, torch.float32, "cpu", quantization=form) for one in ranges])


def products(decoder: Decoder, layer: int) -> dict[tuple[str, ...], Linear]:
    """Those whose rows nobody interleaved."""
    block = decoder._blocks[layer]
    assert isinstance(block.mlp, GatedMlp)
    return {(OUT,): block.out, (DOWN,): block.mlp.down, ("mlp.gate_proj", UP): block.mlp.gate_up}


def codes_in(held: Any) -> Tensor:
    """[out, in], out of the tiles of a CPU's kernels."""
    if isinstance(held, Fp8):
        return held._fp8_weight.view(torch.uint8)
    weight = held.weight
    if weight.bits == 8:
        tiles = weight.arrays.codes.view(weight.outputs // 16, -1, 16, 4).transpose(1, 2)
        return (tiles.reshape(weight.outputs, -1)[:, : weight.shape[1]].int() - 128).to(torch.int8)
    pairs = weight.arrays.codes.view(-1, weight.inputs // 32, 320)[..., :256].unflatten(2, (4, 16, 4))
    return torch.stack((pairs & 15, pairs >> 4), -1).permute(0, 3, 1, 2, 5, 4).reshape(weight.shape)


def product_of(codes: Codes, x: Tensor) -> Tensor:
    """Of activations rounded by 64 or 32, with scales as the kernels have them."""
    four = codes.scale.shape[1] > 1
    whole, scales = (each.double() for each in rounded_rows(x, 32 if four else 64))
    short = [each.half() if four else each for each in codes[1:]]
    factor, least = (each.double().repeat_interleave(x.shape[1] // each.shape[1], 1) for each in short)
    return (whole * scales).flatten(1)[:, : x.shape[1]] @ (codes.values.double() * factor + least).t()


@pytest.mark.parametrize("name", FORMS)
def test_codes_are_held_as_the_files_have_them(name: str, tmp_path: Path) -> None:
    """And multiplied as they say; over ranges, and near the decoded model's logits."""
    directory, form = written(name, tmp_path), FORMS[name]
    files, whole = published(directory), load(directory, form)
    assert files.published.form == form
    for names, linear in products(whole.decoders[0], 1).items():
        matrices = [f"model.layers.1.{one}" for one in names]
        stored = [files._decode(one, "cpu") for one in matrices]
        parts = [codes_of(one, form) for one in stored]
        for one, part in zip(stored, parts):
            read = one.codes.view(torch.uint8) if form == "fp8" else one.codes
            assert (part.values.int() - read.int()).unique().numel() == 1, "but for what is zero"
        codes, held = Codes(*map(torch.cat, zip(*parts))), linear.multiply
        assert torch.equal(codes_in(held), codes.values)
        decoded = torch.cat([files.tensor(f"{one}.weight", torch.float32, "cpu") for one in matrices])
        x = torch.randn(5, decoded.shape[1], generator=torch.Generator().manual_seed(1))
        if isinstance(held, Packed):
            assert held.weight.nbytes == stored_bytes(tuple(decoded.shape), 4, form)
            wanted = product_of(codes, x)
            off = (held(torch.eye(decoded.shape[1])).t() - decoded).abs()
            assert (off <= 0.005 * codes.scale.amax()).all(), "of 4 bits the least value is in fp16"
        else:
            assert isinstance(held, Fp8)
            wanted = F.linear(x, decoded).double()
        torch.testing.assert_close(linear(x).double(), wanted, rtol=1e-4, atol=1e-4)
    plain, found = load(directory, None).feed(PROMPT, 0)[0], whole.feed(PROMPT, 0)[0]
    assert (found - plain).norm() < 0.05 * plain.norm()
    layers = range(1, whole.decoders[0].config.layers + 1)
    apart = load(directory, form, *layers).feed(PROMPT, 0)[0]
    torch.testing.assert_close(apart, found, rtol=0, atol=1e-4 if form == "fp8" else 0)


def test_what_others_left_whole_has_8_bits(tmp_path: Path) -> None:
    """Not the 4 of what they rounded; half a product is refused."""
    decoded = write_compressed(tmp_path, [scheme_of("W4A16", group_size=32)], **WIDE)

    def leave_whole(name: str) -> None:
        tensors = load_file(tmp_path / "model.safetensors")
        kept = {key: one for key, one in tensors.items() if not key.startswith(f"{name}.")}
        kept[f"{name}.weight"] = decoded[f"{name}.weight"].contiguous()
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})

    leave_whole(f"model.layers.1.{OUT}")
    held = products(load(tmp_path, "int4").decoders[0], 1)
    assert [one.multiply.weight.bits for one in held.values()] == [8, 4, 4]
    counted = published(tmp_path)
    assert counted.form(f"model.layers.1.{OUT}.weight", "int4") == "int8"
    assert counted.form(f"model.layers.1.{DOWN}.weight", "int4") == "int4"
    leave_whole(f"model.layers.1.{UP}")
    with pytest.raises(ModelError, match=r"layers.1.mlp.gate_proj, .*only some of them are quantized"):
        load(tmp_path, "int4")


def test_what_no_form_holds_is_decoded(tmp_path: Path) -> None:
    for name in ("gptq-v2", "bnb-nf4"):
        assert published(KEPT / name).published.form is None
    for change in ({"desc_act": True}, {"group_size": 16}, {"bits": 8}):
        config = json.loads((KEPT / "gptq" / "config.json").read_text())
        config["quantization_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = published_of(tmp_path)
        assert found is not None
        assert found.form is None
    with pytest.raises(InvalidRequest, match=r"leave out --quantization or say int4$"):
        published_of(KEPT / "awq", "int8")
    stored = published(KEPT / "gptq-v2")._decode(f"model.layers.0.{DOWN}", "cpu")
    for form, said in (("int8", "several scales"), ("int4", "more than 4 bits"), ("fp8", "several scales")):
        with pytest.raises(ValueError, match=said):
            codes_of(stored, form)


def test_codes_run_as_they_are_unless_a_dtype_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ModelOptions(KEPT / "awq", kv_memory=1 << 20)
    joining = StageLoader(given, "w").registration()
    assert joining.quantization == f"{describe_rounding('int4', 'cpu')}, fp16 KV"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "published weights" in line]
    assert "as they are: int4 weights, int8 embedding" in said

    def chosen(name: str, **more: Any) -> Quantization | None:
        return as_published(ModelOptions(KEPT / name, **more), KEPT / name).quantization

    assert chosen("bnb-int8") == chosen("bnb-int8", device="cuda") == "int8"
    assert chosen("awq", dtype="bf16") is chosen("bnb-nf4") is chosen("awq", device="cuda") is None
    with monkeypatch.context() as old_processor:
        old_processor.setattr(binding, "get_host_cpu_features", dict)
        assert chosen("awq") is None
    monkeypatch.setattr(stored_form, "find_spec", {}.get)
    assert chosen("awq") is None


def test_a_gpu_with_products_of_8_bit_floats_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compressed(tmp_path, [scheme_of("FP8_DYNAMIC")], num_hidden_layers=1)
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: device.type == "cuda")
    for more, form in (({"device": "cuda"}, "fp8"), ({}, None), ({"device": "cuda", "dtype": "bf16"}, None)):
        assert as_published(ModelOptions(tmp_path, **more), tmp_path).quantization == form
    for option in ("batch_invariant", "draft_invariant"):
        invariant = ModelOptions(tmp_path, device="cuda", **{option: True})
        assert as_published(invariant, tmp_path).quantization is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_8_bit_floats_on_a_gpu(tmp_path: Path) -> None:
    """In captured graphs, over the codes of the files."""
    write_compressed(tmp_path, [scheme_of("FP8_DYNAMIC")], **WIDE)
    options = as_published(ModelOptions(tmp_path, device="cuda"), tmp_path)
    assert options.quantization == "fp8"
    held, plain = Decoder.of(options), Decoder.load(tmp_path, None, torch.bfloat16, "cuda")
    assert held.capturable
    for names, linear in products(held, 1).items():
        stored = [published(tmp_path)._decode(f"model.layers.1.{one}", "cuda") for one in names]
        assert torch.equal(
            codes_in(linear.multiply), torch.cat([one.codes.view(torch.uint8) for one in stored])
        )
    found, wanted = (Ring.of([one]).feed(PROMPT, 0)[0].float() for one in (held, plain))
    assert 0 < (found - wanted).norm() < 0.15 * wanted.norm()
