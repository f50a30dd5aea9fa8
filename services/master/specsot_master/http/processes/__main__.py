"""An API process: `python -m specsot_master.http.processes LINK HANDOVER`, which the engine starts.

LINK and HANDOVER are the numbers of two inherited sockets: that of the link to the engine, and the one over
which accepted connections arrive.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from specsot.service.runtime_env import set_runtime_defaults


def main() -> int:
    """Serve connections until the engine orders this process to leave, or has ended. Return the exit status:
    0. An error at the start is raised.

    Signals that end the engine reach this process, too, if they come from a terminal. They are ignored,
    because the engine first lets running requests end.
    """
    set_runtime_defaults()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link, handover = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    import uvloop

    from specsot_master.http.processes.api_process import run

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(link, handover))
    return 0


if __name__ == "__main__":
    sys.exit(main())
