"""GGUF files in packed int8: the kernel's bits, what is kept between starts, where int8 is the default."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llvmlite import binding
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specsot.checkpoint.config import read_config
from specsot.checkpoint.gguf.directory import POINTER
from specsot.checkpoint.resolving import resolve_model
from specsot.members import Quantization, Range
from specsot.service.options import ModelOptions
from specsot_app.fleet.options import FleetOptions, Models, resolved
from specsot_drafter.heads.loading import load_head
from specsot_kernels.cpu import blocks, layout
from specsot_kernels.cpu.running import PackedWeight, multiply
from specsot_model import stored_form
from specsot_model.decoder import Decoder
from specsot_model.gguf_tensors import StoredPart, StoredRows, decode_rows
from specsot_model.linear import Packed, ProjectedTable, look_up, pack_table, stored_bytes
from specsot_model.packed_files import PackedFiles, flush
from specsot_model.published import open_weights
from specsot_model.stored_form import as_published
from specsot_worker.loader import StageLoader
from tests.conftest import some
from tests.drafter.heads import Tensors, change, configure, write_pair
from tests.model.gguf_files import KINDS, write_gguf
from tests.model.test_gguf import PROMPT, SHAPE
from tests.model.tiny import Ring, write_model

Kind = GGMLQuantizationType
# Where the blocks of a type have fp16 numbers.
HALVES = {
    Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_0: [0], Kind.Q5_1: [0, 2], Kind.Q8_0: [0],
    Kind.Q2_K: [80, 82], Kind.Q3_K: [108], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208],
    Kind.IQ4_NL: [0], Kind.IQ4_XS: [0],
}  # fmt: skip
# A model whose layers one kernel runs, and one whose layers it does not run.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "pythia": ("gpt_neox", {}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsot"


def stored(kind: GGMLQuantizationType, rows: int, inputs: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random rows of a type, whose fp16 numbers are finite."""
    drawn = np.random.default_rng(kind.value)
    block, size = GGML_QUANT_SIZES[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return gguf.quants.quantize(drawn.standard_normal((rows, inputs)).astype(np.float32), kind).view(
            np.uint8
        )
    found = drawn.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        found[..., at : at + 2] = drawn.standard_normal(found.shape[:2]).astype("<f2")[..., None].view("u1")
    return found.reshape(rows, -1)


@pytest.mark.parametrize(
    "kind", [*map(Kind, blocks.DECODERS), Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS]
)
def test_blocks_are_packed_to_the_bits_of_their_decoded_floats(kind: GGMLQuantizationType) -> None:
    """Two tensors in one weight, outputs and inputs that fill no whole block, a row of zeros, and a bias."""
    tensors = [stored(kind, rows, 768) for rows in (37, 20)]
    tensors[1][3] = 0
    for rows in tensors:
        rows.flags.writeable = False  # As the rows of a mapped file are: Numba compiles for either kind.
    outputs = np.random.default_rng(0).permutation(57)
    parts = [StoredPart(tensors[0], kind, outputs[:37]), StoredPart(tensors[1], kind, outputs[37:])]
    decoded = torch.from_numpy(np.concatenate([decode_rows(rows, kind) for rows in tensors]))
    bias = torch.arange(57.0)
    wanted = PackedWeight(decoded[torch.from_numpy(np.argsort(outputs))], bias, 8)
    found = PackedWeight.of_blocks((57, 768), parts, bias, decode_rows, 8)
    assert all(torch.equal(one, other) for one, other in zip(found.arrays, wanted.arrays))


KEPT = [Kind(kind) for kind in layout.LOSSLESS_TYPES]
# Without those whose products this processor's kernel lacks.
MULTIPLIED = [kind for kind in KEPT if layout.LOSSLESS_TYPES[kind] in layout.FORMATS]


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 4 and 6 bits are kept, as on processors that have AVX2 and no VNNI."""
    monkeypatch.setattr(layout, "ENABLED_LOSSLESS_TYPES", layout.LOSSLESS_TYPES)


def kept(kind: GGMLQuantizationType, bias: torch.Tensor | None = None) -> tuple[Packed, torch.Tensor]:
    """A weight of 57 outputs, of two tensors whose rows are mixed, as it is kept, and its numbers in fp32."""
    rows = stored(kind, 57, 768)
    rows[3] = 0
    rows.flags.writeable = False  # As the rows of a mapped file are.
    outputs = np.random.default_rng(0).permutation(57)
    parts = tuple(StoredPart(rows[some], kind, outputs[some]) for some in (slice(37), slice(37, 57)))
    packed = Packed(StoredRows(torch.Size((57, 768)), parts), bias, "int8")
    return packed, torch.from_numpy(decode_rows(rows, kind))[torch.from_numpy(np.argsort(outputs))]


@pytest.mark.usefixtures("keeps")
@pytest.mark.parametrize("kind", KEPT)
def test_numbers_of_four_and_six_bits_are_kept(kind: GGMLQuantizationType) -> None:
    """The package gguf reads the same fp32 numbers from the file, bit for bit."""
    packed, numbers = kept(kind)
    assert packed.weight.bits == layout.LOSSLESS_TYPES[kind]
    assert packed.weight.nbytes == stored_bytes((57, 768), 4, "int8", kind) < 57 * 768
    some = torch.tensor([56, 3, 3, 0, 17])
    assert torch.equal(packed.rows(torch.arange(57)), numbers)
    assert torch.equal(packed.rows(some), numbers[some])


@pytest.mark.usefixtures("keeps")
@pytest.mark.parametrize("kind", MULTIPLIED)
def test_products_of_kept_numbers_are_those_of_float64(kind: GGMLQuantizationType) -> None:
    """Inputs that are whole numbers of 8 bits are not rounded."""
    bias = torch.arange(57.0)
    packed, numbers = kept(kind, bias)
    x = torch.randint(-127, 128, (9, 768), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127
    exact = x.double() @ numbers.double().T + bias
    # Roundings of fp32 sums, beside the sizes of what is added.
    sizes = x.double().abs() @ numbers.double().abs().T
    assert ((packed(x) - exact).abs() <= 1e-6 * sizes + 1e-5).all()


@pytest.mark.usefixtures("keeps")
@pytest.mark.parametrize("kind", MULTIPLIED)
def test_a_row_of_kept_numbers_is_the_same_bits_in_any_company(kind: GGMLQuantizationType) -> None:
    packed, numbers = kept(kind)
    x = torch.randn(40, 768, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([packed(row[None]) for row in x])
    # Rounded inputs are near: a scale for each 32.
    torch.testing.assert_close(alone, x @ numbers.T, rtol=0, atol=float((x @ numbers.T).abs().max()) / 40)
    for rows in (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 22, 31, 40):
        assert torch.equal(packed(x[-rows:].clone()), alone[-rows:]), rows
    first = multiply(x, packed.weight.first(32))
    assert torch.equal(first, alone[:, :32])
    x[1, 5] = torch.inf
    found = packed(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[2:], alone[2:])


@pytest.mark.usefixtures("keeps")
@pytest.mark.parametrize("kind", [*MULTIPLIED, Kind.Q8_0])
def test_a_kept_file_has_the_weight_and_no_other_shape(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    rows = stored(kind, 57, 768)
    parts = (StoredPart(rows, kind, np.arange(57)),)
    packed = Packed(StoredRows(torch.Size((57, 768)), parts), torch.arange(57.0), "int8")
    with (tmp_path / "mark").open("w") as mark:
        files = PackedFiles(tmp_path, mark)
        written = files.keep("weight", packed)
        flush()
        found = files.find("weight", (57, 768))
        assert found is not None
        for one in (written, found):
            assert one.weight.bits == packed.weight.bits == layout.LOSSLESS_TYPES.get(kind, 8)
            assert all(torch.equal(*pair) for pair in zip(one.weight.arrays, packed.weight.arrays))
        assert files.find("weight", (57, 1024)) is None
        # The header names bits of which the file's size is not.
        file = tmp_path / "weight"
        other = 4 if packed.weight.bits == 8 else 8
        head = json.dumps({"shape": [57, 768], "bits": other}).encode().ljust(4096)
        file.write_bytes(head + file.read_bytes()[4096:])
        assert files.find("weight", (57, 768)) is None


def test_types_that_differ_are_rounded_to_8_bits() -> None:
    """As queries and keys in Q4_K next to values in Q6_K."""
    parts = tuple(
        StoredPart(stored(kind, 16, 256), kind, np.arange(first, first + 16))
        for first, kind in ((0, Kind.Q4_K), (16, Kind.Q6_K))
    )
    packed = Packed(StoredRows(torch.Size((32, 256)), parts), None, "int8")
    assert packed.weight.bits == 8


def test_a_table_is_the_same_packed_at_once_and_in_parts() -> None:
    rows = torch.randn(70, 96, generator=torch.Generator().manual_seed(3))
    wanted = PackedWeight(rows, None, 8)
    found = pack_table(iter(rows.split(32)), (70, 96)).weight
    assert all(torch.equal(one, other) for one, other in zip(found.arrays, wanted.arrays))


class CountedRows(Packed):
    """A packed embedding that notes which rows are read."""

    read: list[int]

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        self.read = [*getattr(self, "read", []), *numbers.tolist()]
        return super().rows(numbers)


def test_a_projected_table_reads_only_the_rows_that_are_looked_up_and_each_once() -> None:
    seeded = torch.Generator().manual_seed(3)
    embedding = CountedRows(torch.randn(50, 96, generator=seeded), None, "int8")
    projection = torch.randn(32, 96, generator=seeded)
    table = ProjectedTable(embedding, projection)
    for tokens in ([4, 9, 4], [9], [], [4, 2]):
        found = look_up(table, torch.tensor(tokens, dtype=torch.long))
        wanted = Packed.rows(embedding, torch.tensor(tokens, dtype=torch.long)) @ projection.T
        torch.testing.assert_close(
            found, wanted, atol=float(wanted.abs().max()) / 200 if tokens else 0, rtol=0
        )
    assert embedding.read == [4, 9, 2]


def opened(file: Path, form: Quantization = "int8", cuts: tuple[int, ...] = (1, 3)) -> list[Decoder]:
    """The ranges of a GGUF file's model, as one process loads them, and the files on the disk."""
    directory = resolve_model(file)
    ends = [*cuts[:-1], read_config(directory).layers]
    made = [
        Decoder.load(directory, Range(first, last), torch.float32, "cpu", quantization=form)
        for first, last in zip((0, *ends), ends)
    ]
    flush()
    return made


def logits_of(decoders: list[Decoder]) -> torch.Tensor:
    return Ring.of(decoders).feed(PROMPT, 0)[0]


def blank(file: Path) -> None:
    """Overwrite the tensors of a file, which keeps its size and its time."""
    when = file.stat()
    size = when.st_size // 2
    with file.open("r+b") as writer:
        writer.seek(size)
        writer.write(bytes(when.st_size - size))
    os.utime(file, ns=(when.st_atime_ns, when.st_mtime_ns))


# Each model in one of the forms; in the other one by `make test-all`.
FORMS = [
    (name, form) for n, name in enumerate(MODELS) for form in (("int8", "int4"), ("int4", "int8"))[n % 2]
]


@pytest.mark.parametrize(("name", "form"), some(FORMS, *range(0, len(FORMS), 2)))
def test_a_later_start_has_the_same_logits_and_reads_no_matrix(
    name: str, form: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changes = MODELS[name]
    file = write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", kind, **SHAPE | changes), KINDS)
    monkeypatch.setattr("specsot_model.weights.packed_files_of", lambda *_: None)
    never_kept = logits_of(opened(file, form))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = logits_of(opened(file, form))
    kept = sorted((tmp_path / "cache/specsot/packed").glob("*/*.weight"))
    times = [one.stat().st_mtime_ns for one in kept]
    later = logits_of(opened(file, form))
    assert torch.equal(never_kept, first)
    assert torch.equal(first, later)
    assert kept
    assert times == [one.stat().st_mtime_ns for one in kept]


def test_kept_weights_are_mapped_and_not_read_from_the_gguf_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "hf", "qwen2", **SHAPE, tie_word_embeddings=True)
    file = write_gguf(tmp_path / "m.gguf", model, (Kind.Q8_0,))
    before = opened(file)
    blank(file)
    after = opened(file)
    for one, other in zip(before, after):
        for block, again in zip(one._blocks, other._blocks):
            packed, found = block.out.multiply, again.out.multiply
            assert torch.equal(packed.weight.arrays.codes, found.weight.arrays.codes)
            assert found.weight.arrays.codes.any()


def test_a_changed_file_is_packed_anew_and_its_old_weights_are_removed(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    for number, kind in enumerate((Kind.Q8_0, Kind.Q4_0)):
        write_gguf(file, write_model(tmp_path / f"{number}", "llama", **SHAPE), (kind,))
        mapped = logits_of(opened(file))
        assert len(list((cache / "packed").iterdir())) == 1
    other = Path(shutil.copy(file, tmp_path / "other.gguf"))
    assert torch.equal(mapped, logits_of(opened(other)))


def test_what_another_version_has_cached_is_removed_and_stops_no_start(tmp_path: Path, cache: Path) -> None:
    models = {name: write_model(tmp_path / name, "llama", **SHAPE) for name in ("earlier", "later")}
    opened(write_gguf(tmp_path / "earlier.gguf", models["earlier"], (Kind.Q8_0,)))
    (pointer,) = (cache / "gguf").rglob(POINTER)
    places = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({name: {"file": place["file"]} for name, place in places.items()}))
    opened(write_gguf(tmp_path / "later.gguf", models["later"], (Kind.Q8_0,)))
    (kept,) = (cache / "packed").iterdir()
    assert not kept.name.startswith(pointer.parts[-3])


def test_a_head_projects_embeddings_when_they_are_looked_up_and_keeps_its_lm_head(
    tmp_path: Path, cache: Path
) -> None:
    """Both are made of the base's tables; another head has others."""
    write_pair(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base = resolve_model(write_gguf(tmp_path / "m.gguf", model, (Kind.Q8_0,)))

    def project(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)
        tensors["embed_proj.weight"] = torch.randn(64, 64)
        tensors["lm_proj.weight"] = torch.randn(64, 64)

    def tables(*parts: int) -> list[torch.Tensor]:
        head = load_head(tmp_path / "head", base, torch.float32, "cpu", quantization="int8")
        looked_up = [look_up(head.table, ids) for ids in torch.arange(200).split(parts or (200,))]
        assert torch.equal(look_up(head.table, torch.tensor([7, 3, 7])), torch.cat(looked_up)[[7, 3, 7]])
        return [torch.cat(looked_up), head.lm_head(torch.eye(64))]

    def kept() -> dict[Path, int]:
        return {one: one.stat().st_mtime_ns for one in (cache / "packed").glob("*/[el]*-*")}

    change(tmp_path, project)
    configure(tmp_path, shares_lm_head=True)
    first = tables()
    flush()
    made = kept()
    assert len(made) == 1
    embeddings, outputs = tables(1, 60, 139)
    assert torch.equal(outputs, first[1])
    assert made == kept()
    # PyTorch may sum in another order, which may round a number to the next code.
    torch.testing.assert_close(embeddings, first[0], atol=float(embeddings.abs().max()) / 126, rtol=0)
    rows = torch.arange(0, 200, 7)
    embeddings = open_weights(base).rows("model.embed_tokens.weight", rows)
    projection = load_file(tmp_path / "head/model.safetensors")["embed_proj.weight"]
    wanted = embeddings @ projection.T
    torch.testing.assert_close(first[0][rows], wanted, atol=float(wanted.abs().max()) / 60, rtol=0)
    change(tmp_path, project)
    assert not torch.equal(tables()[0], first[0])


@pytest.mark.parametrize("harm", [lambda file: file.write_bytes(file.read_bytes()[:-64]),
                                  lambda file: file.write_bytes(b" " * file.stat().st_size),
                                  lambda file: file.unlink()])  # fmt: skip
def test_a_kept_file_that_is_not_whole_is_made_again(harm: Any, tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q8_0,))
    wanted = logits_of(opened(file))
    kept = sorted((cache / "packed").glob("*/*.weight"))
    sizes = [one.stat().st_size for one in kept]
    for one in kept:
        harm(one)
    assert torch.equal(logits_of(opened(file)), wanted)
    assert [one.stat().st_size for one in kept] == sizes


def test_weights_are_packed_at_every_start_if_the_disk_is_full(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specsot_model.packed_files.FREE_ON_DISK", 1 << 62)
    file = write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q8_0,))
    assert torch.equal(logits_of(opened(file)), logits_of(opened(file)))
    assert not list((cache / "packed").glob("*/*.weight"))


def test_unfinished_files_are_removed_after_an_hour(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q8_0,))
    opened(file)
    (folder,) = (cache / "packed").iterdir()
    old, new = folder / ".unfinished-old", folder / ".unfinished-new"
    for one in (old, new):
        one.touch()
    os.utime(old, (1e9, 1e9))
    opened(file)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("kind", "given", "form"),
    [
        (Kind.Q8_0, {}, "int8"),
        (Kind.Q4_0, {}, "int8"),
        (Kind.F16, {}, None),
        (Kind.F32, {}, None),
        (Kind.Q4_0, {"quantization": "none"}, None),
        (Kind.Q4_0, {"quantization": "int4"}, "int4"),
        (Kind.Q4_0, {"dtype": "bf16"}, None),
        (Kind.Q4_0, {"device": "cuda"}, None),
    ],
)
def test_a_gguf_file_of_few_bits_is_int8_on_a_cpu_unless_the_user_says_otherwise(
    kind: GGMLQuantizationType, given: dict[str, Any], form: str | None, tmp_path: Path
) -> None:
    base = resolve_model(write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (kind,)))
    once = as_published(ModelOptions(base, **given), base)
    assert once.stored_form == form
    assert as_published(once, base) == once


def test_a_processor_without_the_instructions_keeps_floats_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"avx2": False, "fma": True, "f16c": True})
    base = resolve_model(write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q4_0,)))
    registered = StageLoader(ModelOptions(base, kv_memory=1 << 20), "w").registration()
    assert registered.quantization == ""
    assert "int8 needs a processor with AVX2" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "outside"), [("llama", ""), ("gemma 3", "layers 0:3 depend on the batch")])
def test_a_registration_names_the_layers_outside_of_the_guarantee(
    name: str, outside: str, tmp_path: Path
) -> None:
    kind, changes = MODELS[name]
    file = write_gguf(
        tmp_path / "m.gguf", write_model(tmp_path / "hf", kind, **SHAPE | changes), (Kind.Q8_0,)
    )
    registered = StageLoader(ModelOptions(resolve_model(file), kv_memory=1 << 20), "w").registration()
    assert registered.quantization.startswith("int8 weights")
    assert ("depend on the batch" in registered.quantization) == bool(outside)
    assert outside in registered.quantization


def test_a_fleet_on_gpus_keeps_a_joining_cpu_from_choosing_int8(tmp_path: Path) -> None:
    base = resolve_model(write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q4_0,)))
    assert resolved(FleetOptions(base, device="cuda"), Models(base, None)).quantization == "none"
    on_cpu = resolved(FleetOptions(base, device="cpu"), Models(base, None))
    assert (on_cpu.quantization, on_cpu.drafter_quantization) == ("int8", "int8")


def test_serve_chooses_the_form_of_weights_without_torch(tmp_path: Path) -> None:
    """A process that only starts others would keep torch's memory for as long as it runs."""
    file = write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q4_0,))
    code = (
        "import sys; from specsot_app.fleet.options import FleetOptions, models_of, resolved;"
        "options = FleetOptions(sys.argv[1], kind='processes');"
        "print(resolved(options, models_of(options)).quantization, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["int8", "False"]


def test_bits_of_a_file_are_those_of_its_matrices(tmp_path: Path) -> None:
    base = resolve_model(write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", **SHAPE), (Kind.Q8_0,)))
    assert stored_form.bits_per_weight(base) == 8.5
