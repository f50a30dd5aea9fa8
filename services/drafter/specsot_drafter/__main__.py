"""`specsot-drafter`: the draft model as a process. Nothing heavy is imported before its options are read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING

from specsot.service.runtime_env import interruptible, set_runtime_defaults

if TYPE_CHECKING:
    from specsot.service.member import MemberProgram
    from specsot.service.options import DraftModelOptions
    from specsot.service.telemetry import Observation
    from specsot.transport.links import Dialer
    from specsot_drafter.drafter import Drafter


def program(arguments: Sequence[str] | None = None) -> MemberProgram:
    """Return the program that runs a drafter with these options.

    arguments: The arguments without the program's name. None: those of the command line.

    Exits with status 2 if an option is wrong, see `read_config`. Defaults of the runtime's environment
    variables are set after the options have been read. On a GPU, the processes that compile the kernels are
    started, see `gpu_compilers`.
    """
    from specsot_drafter.config import read_config
    from specsot_kernels.gpu_compilers import start_unless_compiled

    config = read_config(arguments)
    set_runtime_defaults()
    if config.draft.device.startswith("cuda"):
        # Started before this process imports torch, so that the compiler processes import it at the same
        # time. The kernels do not depend on the memory of the KV cache.
        start_unless_compiled(replace(config.draft, kv_memory=None))
    from specsot.service.member import MemberProgram

    def make(
        seen: Observation,
        options: DraftModelOptions,
        name: str,
        address: str,
        dialer: Dialer,
        compute: Executor,
    ) -> Drafter:
        """Return the drafter.

        seen: Metrics and traces, which may be off.
        options: Draft model, base model and device.
        name: Name of the drafter in the ring.
        address: Where other members reach it.
        dialer: Opens links to stages.
        compute: Executor that runs tensor work.
        """
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader
        from specsot_drafter.telemetry import DrafterTelemetry

        observer = DrafterTelemetry(seen) if seen.on else None
        return Drafter(DraftLoader(options, name, address), dialer, compute, observer)

    return MemberProgram("drafter", config.member, config.service, config.draft, make)


def main() -> int:
    """Run the drafter that the command line describes, as a member of a fleet, until it ends. Return the exit
    status.

    The status is 0 after a signal, 2 for a wrong option (the process exits while reading options), a missing
    or broken model, missing torch or a member that the master rejects, and 1 for any other error.
    Ctrl-C before the members run gives INTERRUPTED of `runtime_env`.
    """

    def run() -> int:
        """Run the drafter until it ends. Return the exit status."""
        own = program()
        from specsot.service.member import run_members

        return run_members(own)

    return interruptible(run)


if __name__ == "__main__":
    sys.exit(main())
