"""Errors of the kernels. `specsot_model` and `specsot_bench` translate them into `specsot.errors`."""

from __future__ import annotations


class InvalidArguments(ValueError):
    """Arrays or numbers that do not fit each other.

    message: what is wrong, with the values.
    field: name of the wrong argument; None if no single argument is wrong.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedProcessor(RuntimeError):
    """The processor lacks instructions that the kernels need."""
