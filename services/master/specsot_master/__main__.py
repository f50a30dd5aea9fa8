"""The command `specsot-master`: runs the master as a process.

This module sets the process's environment before any large module is imported.
"""

from __future__ import annotations

import sys

from specsot.service.runtime_env import interruptible, set_runtime_defaults


def main() -> int:
    """Run the master with the options of the command line until SIGINT or SIGTERM arrives. Return the
    process's exit status: 0 after a shutdown, 2 for wrong options, a model that cannot be used or any other
    error that another start would meet again, and another number for all other errors and for Ctrl-C before
    the master runs.
    status: 0 after a shutdown, another number if the master could not start or failed; wrong options exit
    with status 2.
    """

    def run() -> int:
        """Set the process's environment, and run the master. Return the process's exit status."""
        set_runtime_defaults()
        from specsot_master.service import run

        return run()

    return interruptible(run)


if __name__ == "__main__":
    sys.exit(main())
