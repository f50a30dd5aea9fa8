"""Prints the figures of all published files as one table after the tests."""

from __future__ import annotations

import pytest

# The property under which a test records its row of the table: the values of COLUMNS, in order.
ROW = "published row"
COLUMNS = ("file", "prompt", "tokens", "not theirs", "their gap there", "logits differ by", "of a range of")
# The property under which a test records one line that precedes the table.
LINE = "published line"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded lines, and the table of recorded rows; nothing if no test has recorded any."""
    reports = [one for key in ("passed", "failed") for one in terminalreporter.getreports(key)]
    recorded = [pair for report in reports for pair in report.user_properties]
    for key, line in recorded:
        if key == LINE:
            terminalreporter.write_line(str(line))
    rows = [COLUMNS, *(row for key, row in recorded if key == ROW and isinstance(row, tuple))]
    if len(rows) == 1:
        return
    widths = [max(len(str(value)) for value in column) for column in zip(*rows)]
    for row in rows:
        terminalreporter.write_line("  ".join(str(value).rjust(width) for value, width in zip(row, widths)))
