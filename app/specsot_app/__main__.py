"""Runs the `specsot` command as a process: `python -m specsot_app` is the same."""

import sys

from specsot.service.runtime_env import interruptible


def main() -> int:
    """Run the command; return its exit status."""

    def run() -> int:
        from specsot_app.cli import main

        return main()

    return interruptible(run)


if __name__ == "__main__":
    sys.exit(main())
