"""`specsot-worker`: runs one layer range as a process.

Nothing heavy is imported before the options have been read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specsot.service.runtime_env import interruptible, set_runtime_defaults

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from specsot.service.member import MemberProgram
    from specsot.service.options import ModelOptions
    from specsot.service.telemetry import Observation
    from specsot.transport.links import Dialer
    from specsot_worker.worker import Worker


def program(arguments: Sequence[str] | None = None) -> MemberProgram:
    """Return the program that runs a worker with these options.

    arguments: The arguments without the program's name. None: those of the command line.

    Exits with status 2 if an option is wrong, see `read_config`. Defaults of the runtime's environment
    variables are set after the options have been read. On a GPU, the worker verifies on a thread of its own,
    and the processes that compile its kernels are started, see `gpu_compilers`.
    """
    from specsot_kernels.gpu_compilers import start_unless_compiled
    from specsot_worker.config import read_config

    config = read_config(arguments)
    set_runtime_defaults()
    if config.model.device.startswith("cuda"):
        # Started before this process imports torch, so that the compiler processes import it at the same
        # time. The kernels do not depend on the memory of the KV cache.
        start_unless_compiled(replace(config.model, kv_memory=None))
    from specsot.service.member import MemberProgram

    def make(
        seen: Observation, options: ModelOptions, name: str, address: str, dialer: Dialer, compute: Executor
    ) -> Worker:
        """Return the worker.

        seen: Metrics and traces, which may be off.
        options: Model and device.
        name: Name of the worker.
        address: Where other members reach it.
        dialer: Opens links to other members.
        compute: Executor that runs tensor work.
        """
        from specsot.service.compute import ComputeThread
        from specsot_worker.loader import StageLoader
        from specsot_worker.telemetry import WorkerTelemetry
        from specsot_worker.worker import Worker

        fault = (
            config.failpoint if config.failpoint and config.failpoint.worker_name in (None, name) else None
        )
        before = fault.count if fault else None
        source = StageLoader(options, name, address, config.layers, prepare_frame=before)
        reading = ComputeThread("reading") if options.device.startswith("cuda") else None
        watch = WorkerTelemetry(seen, config.trace_steps) if seen.on else None
        return Worker(source, dialer, compute, observer=watch, verify_thread=reading)

    return MemberProgram("worker", config.member, config.service, config.model, make)


def main() -> int:
    """Run the worker until it ends. Return the exit status.

    Reads the options of the command line, which exits with status 2 if one is wrong. The status is 0 after a
    signal, 2 for a missing or broken model, missing torch or a member that the master rejects, and 1 for any
    other error. Ctrl-C before the members run
    gives INTERRUPTED of `runtime_env`.
    """

    def run() -> int:
        """Run the worker until it ends. Return the exit status."""
        own = program()
        from specsot.service.member import run_members

        return run_members(own)

    return interruptible(run)


if __name__ == "__main__":
    sys.exit(main())
