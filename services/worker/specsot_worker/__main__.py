"""`specsot-worker`: one layer range as a process. Nothing heavy is imported before its options are read."""

from __future__ import annotations

import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

from specsot.service.runtime_env import set_runtime_defaults
from specsot_worker.config import read_config

if TYPE_CHECKING:
    from specsot.service.options import ModelOptions
    from specsot.service.telemetry import Observation
    from specsot.transport.links import Dialer
    from specsot_worker.worker import Worker


def main() -> int:
    config = read_config()
    set_runtime_defaults()
    from specsot.service.member import run_member

    def make(
        seen: Observation, options: ModelOptions, name: str, address: str, dialer: Dialer, compute: Executor
    ) -> Worker:
        from specsot_worker.loader import StageLoader
        from specsot_worker.telemetry import WorkerTelemetry
        from specsot_worker.worker import Worker

        fault = config.failpoint if config.failpoint and config.failpoint.whom in (None, name) else None
        before = fault.count if fault else None
        source = StageLoader(options, name, address, config.layers, before_frame=before)
        reading = ThreadPoolExecutor(1, "reading") if options.device.startswith("cuda") else None
        watch = WorkerTelemetry(seen, config.trace_laps)
        return Worker(source, dialer, compute, observer=watch, verify_thread=reading)

    return run_member("worker", config.member, config.service, config.model, make)


if __name__ == "__main__":
    sys.exit(main())
