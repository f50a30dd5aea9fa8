"""Translates the errors of `specsot_kernels` into those of SpecSoT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specsot.errors import InvalidRequest
from specsot_kernels.errors import InvalidArguments


@contextmanager
def as_invalid_request() -> Iterator[None]:
    """Within the context, which yields None, raise InvalidRequest in place of a kernel's InvalidArguments,
    with the same message and field.
    """
    try:
        yield
    except InvalidArguments as error:
        raise InvalidRequest(str(error), error.field) from error
