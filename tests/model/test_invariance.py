"""Batch-invariant: logits are the same bits plain, as a tree, in chunks, beside others, behind moved rows.

On a CPU in 8 and 4 bits, always; else on a GPU alone. In Triton's interpreter NumPy multiplies, whose
sums depend on where in a tile a row lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.core.tree import ancestry, depths
from specsot.errors import InvalidRequest
from specsot.members import Quantization, Range
from specsot_kernels.segments import VisibleColumns
from specsot_model import packed as packing
from specsot_model.attention import RowSpan, attend, plan_attention
from specsot_model.cuda_graphs import CapturedSteps, GraphCapture, StepRows
from specsot_model.decoder import Decoder
from specsot_model.layers import add_tap
from tests.model.tiny import ShortRows, write_model

LARGEST = 65_504.0
PAGE = 16
DEVICE = "cuda"
PROMPT = [3 + place * 7 % 90 for place in range(600)]  # a line of it is cut once
WRITTEN = [11, 12, 13, 14]


class Texts:
    """Some sequences over one decoder; each has pages of its own."""

    def __init__(self, decoder: Decoder, texts: int = 4, pages: int = 40) -> None:
        self._decoder, self.kv = decoder, decoder.make_kv(texts * pages, PAGE)
        self._texts, self._pages = texts, pages
        self._steps: CapturedSteps | None = None

    def pages(self, text: int) -> tuple[int, ...]:
        return tuple(self._texts * page + text for page in range(self._pages))

    def slot(self, text: int, column: int) -> int:
        return self.pages(text)[column // PAGE] * PAGE + column % PAGE

    def capture(self, buckets: Sequence[int]) -> None:
        """Frames of so many rows run in graphs from now on."""
        self._steps = CapturedSteps(self._decoder, self.kv, {}, GraphCapture(), buckets)

    @torch.inference_mode()
    def feed(self, *parts: tuple[int, int, list[int], tuple[int, ...] | None]) -> list[torch.Tensor]:
        """One frame: of each part (text, column, tokens, parents of a tree or None) the logits."""
        spans, tokens, positions, slots = list[RowSpan](), list[int](), list[int](), list[int]()
        for text, start, own, parents in parts:
            seen = None if parents is None else ancestry(parents)
            spans.append(RowSpan(len(own), start, len(own), self.pages(text), seen))
            tokens += own
            positions += [start + deep for deep in (range(len(own)) if parents is None else depths(parents))]
            slots += [self.slot(text, start + row) for row in range(len(own))]
        found = self._steps.run(StepRows(tokens, positions, slots, spans)) if self._steps else None
        if found is None:
            plan, device = self._decoder.plan(spans, PAGE, "batched"), self._decoder.device
            entry = self._decoder.embed(torch.tensor(tokens, device=device))
            at, places = torch.tensor(positions, device=device), torch.tensor(slots, device=device)
            found = self._decoder.forward(entry, at, places, plan, self.kv)
        hidden, _ = found
        return list(self._decoder.logits(hidden).cpu().split([len(own) for _, _, own, _ in parts]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kind", "held"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, "int8")],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sequence_is_bitwise_equal_in_any_batch(
    tmp_path: Path, family: str, kind: torch.dtype, held: Quantization | None
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "head_dim": 64,
    }
    write_model(tmp_path, family, num_hidden_layers=2, max_position_embeddings=1024, **sizes)
    load = Decoder.load(tmp_path, Range(0, 2), kind, DEVICE, quantization=held, batch_invariant=True)
    texts = Texts(load)
    check(texts, PROMPT)
    texts.capture((1, 4, 8, 96, 512))
    check(texts, PROMPT)  # over what was there: the same text, again
    check(texts, PROMPT[:300])


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_columns_that_are_fetched_ahead_are_somewhere() -> None:
    """Of a long text's columns, and then of a short one's."""
    from specsot_kernels.cpu import layout
    from specsot_kernels.cpu.running import plan_columns

    texts = RowSpan(1, 200, 1, tuple(range(13))), RowSpan(1, 2, 1, (13,))
    tree = RowSpan(2, 4, 2, (14,), (0b01, 0b11))
    for held in plan_columns((*texts, tree), PAGE, 128, 1).held:
        assert not held[-layout.COLUMNS_AT_ONCE :].any()


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize(("family", "kind"), [("llama", "int8"), ("qwen3", "int4"), ("qwen2", "int8")])
def test_so_it_is_on_a_cpu_in_few_bits(tmp_path: Path, family: str, kind: Quantization, threads: int) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "head_dim": 80,
    }
    write_model(tmp_path, family, num_hidden_layers=2, max_position_embeddings=1024, **sizes)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        load = Decoder.load(
            tmp_path, Range(0, 2), torch.float32, "cpu", quantization=kind, batch_invariant=True
        )
        check(Texts(load), PROMPT[:90])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_what_layers_are_tapped_for_is_the_same_bits_within_their_call(tmp_path: Path) -> None:
    """As by a product of its own between two calls; the last tap reads what the last layer leaves."""
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    write_model(tmp_path, "llama", num_hidden_layers=3, max_position_embeddings=1024, **sizes)
    decoder = Decoder.load(tmp_path, Range(0, 3), torch.float32, "cpu", quantization="int4")
    taps = {layer: decoder.hold_tap(torch.randn(24, 96)) for layer in (0, 2, 3)}
    plan, at = decoder.plan([RowSpan(5, 0, 5, (0,))], PAGE, "batched"), torch.arange(5)
    alone, inputs, layers = decoder.embed(at + 7), list[torch.Tensor](), decoder.make_kv(1, PAGE)
    for layer in range(3):
        one = Decoder.load(tmp_path, Range(layer, layer + 1), torch.float32, "cpu", quantization="int4")
        inputs.append(alone.clone())
        alone, _ = one.forward(alone, at, at, plan, one.make_kv(1, PAGE))
    inputs.append(alone)
    hidden, fused = decoder.forward(decoder.embed(at + 7), at, at, plan, layers, taps)
    wanted = None
    for layer, tap in taps.items():
        wanted = add_tap(inputs[layer], tap, wanted)
    assert fused is not None
    assert wanted is not None
    assert torch.equal(hidden, alone)
    assert torch.equal(fused, wanted)


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "dim"),
    [
        *[("llama", *sizes) for sizes in ((1, 1, 64), (4, 2, 80), (3, 1, 64), (8, 2, 16), (5, 1, 32))],
        *[("llama", *sizes) for sizes in ((7, 1, 64), (8, 1, 128))],
        ("smollm3", 4, 2, 32),
        ("granite", 4, 2, 32),
    ],
)
def test_rows_of_64_sequences_equal_those_of_each_alone_and_are_near_other_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, heads: int, kv_heads: int, dim: int
) -> None:
    """Keys and values in fp16, however many queries read one of them, and wherever their pages lie."""
    sizes: dict[str, Any] = {"hidden_size": 32 * heads, "intermediate_size": 160, "head_dim": dim}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    write_model(tmp_path, kind, num_hidden_layers=2, max_position_embeddings=1024, **sizes, **counts)
    given = tmp_path, Range(0, 2), torch.float32, "cpu"
    packed = Decoder.load(*given, quantization="int8")
    monkeypatch.setattr(packing, "can_pack", lambda config: False)
    layered = Decoder.load(*given, quantization="int8")
    many, plain = Texts(packed, 64, 6), Texts(layered, 64, 6)
    assert (many.kv.layers[0].dtype, plain.kv.layers[0].dtype) == (torch.float16, torch.float32)
    plain.kv = ShortRows(2, 64 * 6, PAGE, kv_heads, dim, torch.float32, "cpu")
    prompts = [PROMPT[text : text + 2 + text * 11 % 88] for text in range(64)]
    for texts in (many, plain):
        texts.feed(*((text, 0, prompt, None) for text, prompt in enumerate(prompts)))
    frame = [(text, len(prompt), [7], None) for text, prompt in enumerate(prompts)]
    found, wanted = many.feed(*frame), plain.feed(*frame)
    for text in (0, 31, 63):
        alone = Texts(packed, 1, 6)
        alone.feed((0, 0, prompts[text], None))
        assert torch.equal(alone.feed((0, len(prompts[text]), [7], None))[0], found[text])
    one, other = torch.cat(found), torch.cat(wanted)
    assert (one - other).norm() < 0.04 * other.norm(), "a rounding that flips in an activation shows"


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@torch.no_grad()
def test_keys_and_values_that_fp16_has_no_room_for_are_its_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an answer goes on; what is not finite is kept as that, and its text fails."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = write_model(tmp_path, "qwen2", num_hidden_layers=1, **sizes)
    given, attention = (tmp_path, Range(0, 1), torch.float32, "cpu"), model.model.layers[0].self_attn
    attention.k_proj.bias[:] = 60_000.0  # turned, it is beyond
    attention.v_proj.bias[:3] = torch.tensor([1e5, -1e5, 65_510.0])
    model.save_pretrained(tmp_path)
    packed = Texts(Decoder.load(*given, quantization="int8"))
    with monkeypatch.context() as without:
        without.setattr(packing, "can_pack", lambda config: False)
        plain = Texts(Decoder.load(*given, quantization="int8"))
    found, _ = packed.feed((0, 0, PROMPT[:20], None)), plain.feed((0, 0, PROMPT[:20], None))
    assert plain.kv.layers[0][0].abs().max() > LARGEST, "keys, too"
    cut = plain.kv.layers[0].clamp(-LARGEST, LARGEST)
    torch.testing.assert_close(packed.kv.layers[0].float(), cut, rtol=1e-3, atol=1e-3)
    assert found[0].isfinite().all()

    attention.v_proj.bias[0] = torch.inf
    model.save_pretrained(tmp_path)
    broken = Texts(Decoder.load(*given, quantization="int8"))
    assert not broken.feed((0, 0, PROMPT[:20], None))[0].isfinite().all(1).any()


def check(texts: Texts, prompt: list[int]) -> None:
    n = len(prompt)
    told = texts.feed((0, 0, prompt, None))[0]
    plain = torch.cat([texts.feed((0, n + at, [token], (0,)))[0] for at, token in enumerate(WRITTEN)])
    # in chunks, beside another text's prompt
    texts.feed((1, 0, prompt[:1], None))
    chunked = texts.feed((2, 0, WRITTEN, None), (1, 1, prompt[1:], None))[1]
    assert torch.equal(chunked, told[1:])
    # a tree whose path is what was written, beside that other text
    tree, parents = [11, 50, 12, 60, 13], (0, 0, 0, 1, 2)
    found = texts.feed((2, len(WRITTEN), [5], (0,)), (1, n, tree, parents))[1]
    assert torch.equal(found[[0, 2, 4]], plain[:3])
    # its accepted rows move up, and the text goes on
    texts.kv.move([(texts.slot(1, n + source), texts.slot(1, n + at)) for at, source in ((1, 2), (2, 4))])
    assert torch.equal(texts.feed((1, n + 3, WRITTEN[3:], (0,)))[0], plain[3:])


@pytest.mark.parametrize(
    ("device", "quantization", "why"),
    [("cpu", None, "a GPU and Triton, or "), ("cuda", "int4", "matrices in --dtype or int8, and ")],
)
def test_what_cannot_promise_that_is_refused(
    demo_model: Path, device: str, quantization: Quantization | None, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^--batch-invariant needs {why}"):
        Decoder.load(
            demo_model / "base",
            Range(0, 1),
            torch.float16,
            device,
            quantization=quantization,
            batch_invariant=True,
        )


def test_a_window_keeps_no_other_row_from_its_kernel() -> None:
    """What looks through one is read by itself; together they get what one plan gives them."""
    torch.manual_seed(2)
    q, kv = torch.randn(5, 1, 2, 8), torch.randn(2, 9, 1, PAGE, 8)
    spans = [
        RowSpan(2, 40, 2, (0, 1, 2), ancestry((0, 0))),
        RowSpan(1, 33, 1, (3, 4, 5), (1,), VisibleColumns((2,), (20,), (0,))),
        RowSpan(2, 20, 2, (6, 7)),
    ]
    given = spans, PAGE, 2, "packed", torch.float32, "cpu"
    found = attend(q, kv, plan_attention(*given, invariant=True))
    wanted = attend(q, kv, plan_attention(*given))
    torch.testing.assert_close(found, wanted)
