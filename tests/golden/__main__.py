"""`python -m tests.golden`: says what has changed since it was recorded; with --write records it anew."""

from __future__ import annotations

import logging
import sys

import structlog

from tests.golden.record import changes, compute, write


def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if sys.argv[1:] == ["--write"]:
        write(compute())
        return 0
    found = changes(compute())
    print("\n".join(found) or "as recorded")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
