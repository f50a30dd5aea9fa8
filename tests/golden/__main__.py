"""`python -m tests.golden`: says what has changed since it was recorded; with --write records it anew."""

from __future__ import annotations

import logging
import os
import sys

import structlog

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the tests have it

from tests.golden import record, runs


def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if sys.argv[1:] == ["--write"]:
        record.write(record.compute())
        runs.write(runs.RUNS)
        return 0
    found = record.changes(record.compute())
    found += [f"another run: {name}" for name in runs.RUNS if runs.RUNS[name]() != runs.recorded(name)]
    print("\n".join(found) or "as recorded")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
