"""Keeps an embedded fleet's log away from the answer: only errors, and on stderr.

Refuses to know what is logged. A program that set structlog up itself keeps its own ways.
"""

from __future__ import annotations

import logging
import sys

import structlog


def hush() -> None:
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
