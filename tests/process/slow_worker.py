"""`python -m tests.process.slow_worker`: specsot-worker as on another machine that is slower.

A frame takes SLOW_FRAME seconds longer (0.5), and this is what the worker says of itself.
"""

# ruff: noqa: E402
import os
import sys
import time
from dataclasses import replace

from specsot.service.runtime_env import set_runtime_defaults

set_runtime_defaults()

from specsot.service.member import MemberProgram, run_members
from specsot_worker.config import read_config
from specsot_worker.loader import StageLoader
from specsot_worker.worker import Worker

FRAME = float(os.environ.get("SLOW_FRAME", "0.5"))


class SlowLoader(StageLoader):
    def registration(self):
        layer = FRAME / self._config.layers
        told = super().registration()
        return replace(
            told, host="slow", curve=tuple((rows, layer + seconds) for rows, seconds in told.curve)
        )


def main():
    config = read_config()

    def make(seen, options, name, address, dialer, compute):
        source = SlowLoader(options, name, address, prepare_frame=lambda: time.sleep(FRAME))
        return Worker(source, dialer, compute)

    return run_members(MemberProgram("worker", config.member, config.service, config.model, make))


if __name__ == "__main__":
    sys.exit(main())
