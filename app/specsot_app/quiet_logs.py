"""Silences an embedded fleet's log but for errors, and libraries' warnings on import."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

import structlog


def quiet_logs() -> None:
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


@contextmanager
def no_import_warnings() -> Generator[None]:
    """While libraries are imported: what they warn of are kernels that nobody calls here."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
