"""Runs the `specsot` command as a process: `python -m specsot_app` is the same."""

import sys

from specsot.service.runtime_env import interruptible


def main() -> int:
    """Run the command with this process's arguments; return its exit status.

    The command is imported inside `interruptible`, so that Ctrl-C during the slow imports also ends the
    process with one line.

    The status is that of `specsot_app.cli.main`, or what `interruptible` returns after Ctrl-C during the
    imports.
    """

    def run() -> int:
        """Import the command and run it with this process's arguments; return its exit status."""
        from specsot_app.cli import main

        return main()

    return interruptible(run)


if __name__ == "__main__":
    sys.exit(main())
