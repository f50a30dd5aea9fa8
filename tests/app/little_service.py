"""A service small enough for a test: says a line, then obeys its first argument."""

import os
import signal
import sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("here I am", flush=True)
if sys.argv[1] == "wait":
    signal.sigwait([signal.SIGTERM])
    print("leaving", flush=True)
elif sys.argv[1] == "fail":
    print("specsot-little: no/where: no such model directory", file=sys.stderr)
    sys.exit(2)
elif sys.argv[1] == "fall":
    sys.exit(7)
elif sys.argv[1] == "report":
    from structlog import PrintLoggerFactory, configure, processors

    from specsot.phases import log_start

    imported = [name in sys.modules for name in ("torch", "specsot_worker.loader")]
    print(sys.argv[2:], os.environ["COLOUR"], imported, flush=True)
    configure(processors=[processors.JSONRenderer()], logger_factory=PrintLoggerFactory())
    log_start()
