"""The decorator that enters inference mode only where a caller has not entered it."""

from __future__ import annotations

import torch

from specsot_model.inference import inference_mode


@inference_mode
def doubled(number: torch.Tensor, times: int = 2) -> torch.Tensor:
    """Multiply, and show by the result whether inference mode was on."""
    return number * times


def test_results_are_inference_tensors_whether_or_not_the_caller_is_in_that_mode() -> None:
    number = torch.ones(2)
    assert doubled(number).is_inference()
    with torch.inference_mode():
        assert doubled(number, times=3).is_inference()
        assert torch.is_inference_mode_enabled(), "the caller's mode stays"
    assert not torch.is_inference_mode_enabled()
    assert not (number * 2).is_inference()
