"""Runs a module that ends with its parent: `python -m specsot_app.fleet.die_with_parent PARENT MODULE ARGS`.

The child itself asks the kernel for this: code between fork and exec may crash in a process that has other
threads, such as gRPC's.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let this process get SIGTERM when its parent ends, even if the parent is killed. Exit now if the parent
    is already gone.

    On other systems than Linux, only the second part is done.

    That exit has the status 0.

    parent: Process id of the expected parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    _, parent, module, *arguments = sys.argv
    end_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
