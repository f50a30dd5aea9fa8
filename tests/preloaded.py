"""What the process that services are forked from has imported: see `forked`."""

from importlib import import_module

from specsot.service.runtime_env import set_runtime_defaults

set_runtime_defaults()
for name in (
    "specsot.service.member",
    "specsot_drafter.drafter",
    "specsot_drafter.loader",
    "specsot_master.service",
    "specsot_worker.loader",
    "specsot_worker.telemetry",
    "specsot_worker.worker",
):
    import_module(name)

from tests.measuring import measure_little  # noqa: E402

measure_little()
