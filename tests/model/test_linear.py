"""Packed products and dtype names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specsot.errors import InvalidRequest
from specsot_model import linear
from specsot_model.linear import Linear, check_device, resolve_dtype
from specsot_model.memory_fit import free_on, gpus_on


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (48, 40)), (torch.float32, (600, 500)), (torch.bfloat16, (48, 40))]
)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 64, 65, 300])
def test_every_number_of_rows_gives_the_plain_product(
    rows: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    generator, (out, width) = torch.Generator().manual_seed(rows), shape
    weight, bias = torch.randn(shape, generator=generator), torch.randn(out, generator=generator)
    x = torch.randn(rows, width + 20, generator=generator)[:, 10 : width + 10]
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    near = {"atol": width * 1e-6, "rtol": 1e-5}
    assert Linear(weight).shape == shape
    with torch.inference_mode():
        torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), **near)
        torch.testing.assert_close(Linear(weight, bias)(x), F.linear(x, weight, bias), **near)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_weights_are_packed_where_the_library_is() -> None:
    assert linear._product_for(torch.float32, "cpu") is linear._onednn_product
    assert linear._product_for(torch.float16, "cpu") is linear._torch_product


def test_what_is_small_in_fp32_is_quicker_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = list[torch.Tensor]()
    monkeypatch.setattr(
        linear, "_product_for", lambda dtype, device: lambda weight, bias: packed.append(weight)
    )
    small, large, half = torch.zeros(48, 40), torch.zeros(600, 500), torch.zeros(48, 40, dtype=torch.bfloat16)
    assert [Linear(weight).weight is weight for weight in (small, large, half)] == [True, False, False]
    assert [one.dtype for one in packed] == [torch.float32, torch.bfloat16]
    assert packed[0] is large


def test_dtype_names() -> None:
    assert resolve_dtype("fp32", "cpu") == torch.float32
    assert resolve_dtype("fp16", "cuda") == torch.float16
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("auto", "cpu") in (torch.float32, torch.bfloat16)
    with pytest.raises(InvalidRequest, match="dtype must be one of auto, fp32, bf16, fp16, got 'int8'"):
        resolve_dtype("int8", "cpu")


def test_a_device_that_is_not_here_is_named() -> None:
    for device in ("cpu", "meta"):
        check_device(device)
    with pytest.raises(InvalidRequest, match="unknown device 'gpu'"):
        check_device("gpu")
    with pytest.raises(InvalidRequest, match=r"device cuda:99: PyTorch .* finds \d+ GPUs"):
        check_device("cuda:99")
    with pytest.raises(InvalidRequest, match="cuda:99"):
        gpus_on("cuda:99")
    with pytest.raises(InvalidRequest, match="cuda:99"):
        free_on("cuda:99")
