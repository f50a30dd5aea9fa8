"""`specsot-master`: the master as a process.

It only settles habits before anything heavy is imported.
"""

from __future__ import annotations

import sys

from specsot.service.runtime_env import interruptible, set_runtime_defaults


def main() -> int:
    def run() -> int:
        set_runtime_defaults()
        from specsot_master.service import run

        return run()

    return interruptible(run)


if __name__ == "__main__":
    sys.exit(main())
