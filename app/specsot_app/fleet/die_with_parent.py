"""`python -m specsot_app.fleet.die_with_parent PARENT MODULE ARGS`: runs a module that ends with its parent.

The child asks for its own end: code run between fork and exec in a process with threads of its own, as
gRPC's, may crash.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with(parent: int) -> None:
    """Even a killed parent leaves nothing running; one that is gone already neither."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    _, parent, module, *arguments = sys.argv
    end_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
