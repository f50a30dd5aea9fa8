"""Runs functions in PyTorch's inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, run in inference mode. If it is called in that mode already, as most functions
    of a step are, nothing is entered: `torch.inference_mode` takes several microseconds for each call, and a
    step has a dozen of them.

    function: The function or method to decorate.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in inference mode."""
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
