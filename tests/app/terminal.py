"""`python -m tests.app.terminal MODULE ARGUMENTS...`: run a module at the terminal that is its input.

The child imports the module itself: code between fork and exec may crash where gRPC has
threads.
"""

from __future__ import annotations

import fcntl
import runpy
import signal
import sys
import termios

if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may ignore it
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
