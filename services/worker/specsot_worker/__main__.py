"""`specsot-worker`: one layer range as a process.

It puts a worker's rooms together and lets them run.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Executor, ThreadPoolExecutor

from specsot.model.config import require_torch
from specsot.service.membership import Part
from specsot.service.runtime_env import set_runtime_defaults
from specsot.transport.links import Dialer
from specsot_worker.config import WorkerConfig, read_config


def main() -> int:
    config = read_config()
    set_runtime_defaults()
    from specsot.service.lifecycle import run_service, write_logs

    write_logs("worker", config.service.log_format, config.service.log_level)
    return run_service("specsot-worker", lambda leaving: serve(config, leaving))


async def serve(config: WorkerConfig, leaving: asyncio.Event) -> None:
    from specsot.service.member import serve_member
    from specsot.service.telemetry import observed

    require_torch()

    def make(name: str, address: str, dialer: Dialer, compute: Executor) -> Part:
        from specsot_worker.loader import StageLoader
        from specsot_worker.telemetry import WorkerTelemetry
        from specsot_worker.worker import Worker

        fault = config.failpoint if config.failpoint and config.failpoint.whom in (None, name) else None
        before = fault.count if fault else None
        source = StageLoader(config.model, name, address, config.layers, before_frame=before)
        reading = ThreadPoolExecutor(1, "reading") if config.model.device.startswith("cuda") else None
        watch = WorkerTelemetry(seen, config.trace_laps)
        return Worker(source, dialer, compute, observer=watch, verify_thread=reading)

    with observed("worker", config.service) as seen:
        await serve_member(make, config.service, config.member, leaving)


if __name__ == "__main__":
    sys.exit(main())
