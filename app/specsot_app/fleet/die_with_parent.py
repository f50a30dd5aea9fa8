"""Runs a module that ends with its parent: `python -m specsot_app.fleet.die_with_parent PARENT MODULE ARGS`.

Without MODULE, what members of a fleet need is imported first. Then the module and its arguments are read
from the standard input, as a JSON list in one line; if that is closed before, the process ends.

The child itself asks the kernel for the signal: code between fork and exec may crash in a process that has
other threads, such as gRPC's.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1
# Modules that members import until their layers are loaded.
NEEDED: Final = (
    "specsot.service.member",
    "specsot_worker.loader",
    "specsot_worker.worker",
    "specsot_drafter.loader",
    "specsot_drafter.drafter",
)
# Package of the kernels for GPUs, whose modules import Triton.
KERNELS: Final = "specsot_kernels.gpu"


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


def read_command_line() -> list[str]:
    """Import what members need; then return the module to run and its arguments, read from the standard
    input. Exit with status 0 if the standard input is closed before.

    The time of the imports and of the wait are phases of the start, see `specsot.phases`.
    """
    from specsot.phases import add_phase, note_imported
    from specsot.service.runtime_env import set_runtime_defaults

    set_runtime_defaults()
    # If a package is missing or broken, the member imports it again and reports that.
    with suppress(Exception):
        for name in NEEDED:
            import_module(name)
        for module in iter_modules(import_module(KERNELS).__path__, f"{KERNELS}."):
            import_module(module.name)
    note_imported()
    began = time.monotonic()
    line = sys.stdin.readline()
    add_phase("awaited the command line", time.monotonic() - began)
    if not line:
        sys.exit(0)
    return json.loads(line)


if __name__ == "__main__":
    _, parent, *words = sys.argv
    end_with(int(parent))
    module, *arguments = words or read_command_line()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
