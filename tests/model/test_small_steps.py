"""With --draft-invariant, a token has the same logits, bit for bit, decoded alone and as a node of a draft
tree of up to 31 nodes. Without it, the usual kernels run.

On a GPU in bf16 and fp16, in graphs; without one, in fp32 within its rounding, to verify that these tests ask
the same of both. `SPECSOT_TEST_MODEL_DIR` names the folder of a real model, which is then asked as well.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specsot.checkpoint.config import read_config
from specsot.errors import InvalidRequest
from specsot.members import KvDtype, Quantization, Range
from specsot_kernels.line_tables import MAX_SMALL_ROWS
from specsot_kernels.segments import RowSpan
from specsot_model import fused
from specsot_model.decoder import Decoder
from specsot_model.graph_tables import FrameTables, SmallStepFrames, frame_tables
from tests.model.test_invariance import PAGE, Texts
from tests.model.tiny import write_model

REAL_MODEL = os.environ.get("SPECSOT_TEST_MODEL_DIR")
ON_GPU = torch.cuda.is_available()
KINDS = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float32,)
PROMPT = 40
POSITIONS = 300 if ON_GPU else 40
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def random_tree(rng: random.Random, path: list[int], nodes: int, vocabulary: int) -> tuple[list[int], ...]:
    """Return tokens, parents and the places of the path's tokens: a tree whose other nodes hang anywhere.

    Nodes come in an order in which parents precede their children, and the path's nodes lie anywhere in it.
    """
    places = [0, *sorted(rng.sample(range(1, nodes), len(path) - 1))]
    tokens = [rng.randrange(vocabulary) for _ in range(nodes)]
    parents = [rng.randrange(max(node, 1)) for node in range(nodes)]
    for index, place in enumerate(places):
        tokens[place] = path[index]
        parents[place] = places[max(index - 1, 0)]
    return tokens, parents, places


def check_trees(decoder: Decoder, seed: int, capture: bool) -> None:
    """Decode a sequence one token at a time; then again in trees, of which the right path is accepted."""
    rng = random.Random(seed)
    vocabulary = decoder.config.vocab
    pages = -(-(PROMPT + POSITIONS + MAX_SMALL_ROWS) // PAGE) + 1
    texts = Texts(decoder, 3, pages)
    if capture:
        texts.capture((1, 2, 4, 8, 16, 32, 64))
    prompt = [rng.randrange(vocabulary) for _ in range(PROMPT)]
    written = [rng.randrange(vocabulary) for _ in range(POSITIONS)]
    for text in (0, 1, 2):
        texts.feed((text, 0, prompt, None))
    alone = [texts.feed((0, PROMPT + at, [token], (0,)))[0] for at, token in enumerate(written)]

    def check_equal(found: torch.Tensor, wanted: torch.Tensor, at: int, nodes: int) -> None:
        if ON_GPU:
            assert torch.equal(found, wanted), (at, nodes)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    at = 0
    while at < POSITIONS - 1:
        nodes = rng.randrange(2, MAX_SMALL_ROWS)
        path = written[at : at + rng.randrange(1, min(nodes, 6) + 1)]
        tokens, parents, places = random_tree(rng, path, nodes, vocabulary)
        tree = (1, PROMPT + at, tokens, tuple(parents))
        # Sometimes another sequence has rows before these.
        others = rng.randrange(MAX_SMALL_ROWS - nodes + 1) if rng.random() < 0.5 else 0
        before = [(2, PROMPT, [rng.randrange(vocabulary) for _ in range(others)], None)] if others else []
        found = texts.feed(*before, tree)[-1]
        for index, place in enumerate(places):
            check_equal(found[place : place + 1], alone[at + index], at + index, nodes)
        start = PROMPT + at
        moves = [
            (texts.slot(1, start + place), texts.slot(1, start + index)) for index, place in enumerate(places)
        ]
        texts.kv.move([(source, target) for source, target in moves if source != target])
        at += len(path)
    for layer in texts.kv.layers:
        rows = [
            torch.stack(
                [
                    layer[:, texts.slot(text, column) // PAGE, :, column % PAGE]
                    for column in range(PROMPT + at)
                ]
            )
            for text in (0, 1)
        ]
        check_equal(rows[1].float(), rows[0].float(), at, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
def test_a_draft_tree_gives_the_bits_of_decoding(tmp_path: Path, family: str, kind: torch.dtype) -> None:
    # Llama's and Mistral's configurations want heads that divide the hidden size.
    more: dict[str, Any] = {"num_attention_heads": 8} if family in ("llama", "mistral") else {}
    if family == "mistral":
        more["sliding_window"] = 64
    write_model(tmp_path, family, num_hidden_layers=3, max_position_embeddings=1024, **(SIZES | more))
    decoder = Decoder.load(tmp_path, Range(0, 3), kind, "cuda", draft_invariant=True)
    assert decoder.runs_small_steps
    check_trees(decoder, 1, capture=True)
    check_trees(decoder, 2, capture=False)


@pytest.mark.gpu
@pytest.mark.skipif(not (ON_GPU and REAL_MODEL), reason="needs a CUDA device, and SPECSOT_TEST_MODEL_DIR")
def test_a_draft_tree_of_a_real_model_gives_the_bits_of_decoding() -> None:
    decoder = Decoder.load(Path(REAL_MODEL or ""), None, torch.bfloat16, "cuda", draft_invariant=True)
    check_trees(decoder, 3, capture=True)


@pytest.mark.skipif(ON_GPU, reason="asked in 16 bits where there is a GPU")
def test_a_draft_tree_gives_the_logits_of_decoding_within_the_rounding_of_fp32(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2", num_hidden_layers=2, max_position_embeddings=1024, **SIZES)
    check_trees(Decoder.load(tmp_path, Range(0, 2), torch.float32, "cpu"), 1, capture=False)


@pytest.mark.parametrize(
    ("dtype", "changes", "expected"),
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {}, True),
        (torch.float32, {}, False),
        (torch.bfloat16, {"attention_softcap": 50.0}, False),
    ],
)
def test_ranges_whose_kernels_keep_the_order_of_sums_run_small_steps(
    demo_model: Path, dtype: torch.dtype, changes: dict[str, Any], expected: bool
) -> None:
    decoder = Decoder.load(demo_model / "base", Range(0, 1), dtype, "cpu", draft_invariant=True)
    decoder.config = replace(decoder.config, **changes)
    assert decoder.runs_small_steps == expected
    usual = Decoder.load(demo_model / "base", Range(0, 1), dtype, "cpu")
    assert not usual.runs_small_steps, "without --draft-invariant"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("options", "small_products", "tables_of_small_steps"),
    [
        ({"draft_invariant": False}, 0, FrameTables),
        # One layer has four products, and lm_head is the fifth.
        ({"draft_invariant": True}, 5, SmallStepFrames),
    ],
)
def test_the_kernels_of_small_steps_run_only_with_draft_invariant(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    options: dict[str, bool],
    small_products: int,
    tables_of_small_steps: type[FrameTables],
) -> None:
    """The layers are those of a GPU; their kernels are interpreted where there is none."""
    from specsot_kernels.gpu import small_products as kernels

    multiplied = list[int]()
    multiply_small = kernels.multiply_small

    def count_and_multiply(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        multiplied.append(len(x))
        return multiply_small(x, *given, **named)

    monkeypatch.setattr(kernels, "multiply_small", count_and_multiply)
    monkeypatch.setattr(fused, "runs_kernels", lambda device: True)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    write_model(tmp_path, "qwen2", num_hidden_layers=1, max_position_embeddings=256, **sizes)
    device = "cuda" if ON_GPU else "cpu"
    decoder = Decoder.load(tmp_path, Range(0, 1), torch.float16, device, **options)
    kv = decoder.make_kv(2, PAGE)
    positions = torch.arange(rows, device=device)
    plan = decoder.plan([RowSpan(rows, 0, rows, (0, 1))], PAGE, "packed")
    hidden, _ = decoder.forward(decoder.embed(positions), positions, positions, plan, kv)
    decoder.logits(hidden)
    assert multiplied == [rows] * small_products
    for size, kind in ((1, tables_of_small_steps), (32, tables_of_small_steps), (48, FrameTables)):
        tables = frame_tables(decoder, kv, size, short_sequences=False, hidden=False)
        assert [type(table) for table in tables] == [kind], size


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("rows", "family"), [(1, "qwen2"), (3, "qwen2"), (2, "qwen3")])
def test_kernels_that_add_up_parts_and_more_give_the_bits_of_separate_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, family: str
) -> None:
    from specsot_kernels.gpu import rows as row_kernels
    from specsot_kernels.gpu import small_products

    monkeypatch.setattr(fused, "runs_kernels", lambda device: True)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    write_model(tmp_path, family, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    device = "cuda" if ON_GPU else "cpu"
    decoder = Decoder.load(tmp_path, Range(0, 2), torch.float16, device, draft_invariant=True)
    positions = torch.arange(rows, device=device)
    plan = decoder.plan([RowSpan(rows, 0, rows, (0, 1))], PAGE, "packed")

    def run() -> tuple[torch.Tensor, ...]:
        kv = decoder.make_kv(2, PAGE)
        for layer in kv.layers:
            layer.zero_()
        hidden, _ = decoder.forward(decoder.embed(positions), positions, positions, plan, kv)
        return hidden, decoder.logits(hidden), *kv.layers

    calls = list[str]()

    def record_calls(module: ModuleType, name: str) -> None:
        call = getattr(module, name)

        def record_and_call(*given: Any, **named: Any) -> Any:
            calls.append(name + " of sums" if "sums" in named else name)
            return call(*given, **named)

        monkeypatch.setattr(module, name, record_and_call)

    record_calls(small_products, "add_and_norm")
    record_calls(row_kernels, "turn_and_store")
    found = run()
    normed = decoder.config.qk_norm
    of_a_layer = ["turn_and_store" if normed else "turn_and_store of sums", "add_and_norm", "add_and_norm"]
    assert calls == [*of_a_layer, *of_a_layer[:2]], "nothing follows the last layer"
    calls.clear()
    hidden = decoder.embed(positions)
    single = Decoder.load(tmp_path, Range(1, 2), torch.float16, device, draft_invariant=True)
    single.run_mlp_between_layers(hidden)
    assert calls == ["add_and_norm"], "the kernel of a layer that another one follows"
    calls.clear()
    monkeypatch.setattr(small_products, "has_parts", lambda weight: False)
    for one, other in zip(found, run()):
        assert torch.equal(one, other)
    assert calls == ["turn_and_store"] * 2


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("rows", [1, 3, MAX_SMALL_ROWS + 1])
@torch.inference_mode()
def test_taps_of_layers_in_kernels_add_the_inputs_of_their_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Of a small step, one kernel adds up the parts of all taps; and one row has the same bits alone."""
    from specsot_kernels.gpu import small_products

    monkeypatch.setattr(fused, "runs_kernels", lambda device: True)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    write_model(tmp_path, "qwen2", num_hidden_layers=2, max_position_embeddings=256, **sizes)
    device = "cuda" if ON_GPU else "cpu"
    decoder = Decoder.load(tmp_path, Range(0, 2), torch.float16, device, draft_invariant=True)
    seeded = torch.Generator().manual_seed(1)
    taps = {layer: decoder.hold_tap(torch.randn(256, 48, generator=seeded).t()) for layer in range(3)}

    def run(rows: int, earlier: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(rows, device=device)
        plan = decoder.plan([RowSpan(rows, 0, rows, (0, 1, 2))], PAGE, "packed")
        given = positions, positions, plan, decoder.make_kv(3, PAGE)
        hidden = decoder.embed(positions)
        wanted = torch.zeros(rows, 48, device=device) if earlier is None else earlier.float()
        for layer, tap in taps.items():
            assert isinstance(tap, torch.Tensor)
            wanted = wanted + hidden.float() @ tap.float().t()
            if layer < 2:
                decoder.run_layers(Range(layer, layer + 1), hidden, *given)
        inputs = decoder.embed(positions), *given[:3], decoder.make_kv(3, PAGE)
        last, features = decoder.forward(*inputs, taps, earlier)
        torch.testing.assert_close(last, hidden, rtol=1e-2, atol=1e-2)
        assert features is not None
        assert features.dtype == torch.float16
        torch.testing.assert_close(features.float(), wanted, rtol=1e-2, atol=2e-2 * float(wanted.abs().max()))
        return last, features

    added = list[torch.Tensor]()
    add_up = small_products.add_up
    monkeypatch.setattr(
        small_products, "add_up", lambda sums, *more: added.append(sums) or add_up(sums, *more)
    )
    _, found = run(rows)
    assert sum(sums.shape[-1] == 48 for sums in added) == (rows <= MAX_SMALL_ROWS)
    if ON_GPU:
        assert rows > MAX_SMALL_ROWS or torch.equal(found[:1], run(1)[1])
    earlier = torch.ones(rows, 48, dtype=torch.float16, device=device)
    assert run(rows, earlier)[1] is earlier


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "tensor_parallel", "why"),
    [
        ("fp8", "auto", 1, "matrices in --dtype, or in int8 "),
        ("int4", "auto", 1, "matrices in --dtype, or in int8 "),
        (None, "int8", 1, "matrices in --dtype, or in int8 "),
        (None, "auto", 2, "one GPU per layer"),
    ],
)
def test_what_cannot_be_draft_invariant_on_a_gpu_is_refused(
    demo_model: Path, quantization: Quantization | None, kv_dtype: KvDtype, tensor_parallel: int, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^--draft-invariant needs {why}"):
        fused.resolve_draft_invariant(
            True,
            read_config(demo_model / "base"),
            torch.device("cuda"),
            torch.bfloat16,
            quantization,
            kv_dtype,
            tensor_parallel,
        )


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_gpu_is_draft_invariant_in_16_bits_unless_told_otherwise(demo_model: Path) -> None:
    config = read_config(demo_model / "base")
    capped = replace(config, attention_softcap=50.0)
    for chosen, model, device, dtype, expected in (
        (None, config, "cuda", torch.bfloat16, True),
        (None, config, "cuda", torch.float32, False),
        (None, config, "cpu", torch.bfloat16, False),
        (None, capped, "cuda", torch.bfloat16, False),
        (False, config, "cuda", torch.bfloat16, False),
        (True, config, "cuda", torch.bfloat16, True),
    ):
        found = fused.resolve_draft_invariant(chosen, model, torch.device(device), dtype, None, "auto", 1)
        assert found == expected, (chosen, device, dtype)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_capped_scores_cannot_be_draft_invariant_on_a_gpu_in_16_bits(demo_model: Path) -> None:
    capped = replace(read_config(demo_model / "base"), attention_softcap=50.0)
    with pytest.raises(InvalidRequest, match=r"^--draft-invariant needs layers without experts, .* capped"):
        fused.resolve_draft_invariant(True, capped, torch.device("cuda"), torch.float16, None, "auto", 1)
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        fused.resolve_draft_invariant(True, capped, torch.device(device), dtype, None, "auto", 1)
