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

from specsot_drafter import loader  # noqa: E402
from specsot_model import cuda_graphs  # noqa: E402

cuda_graphs.MIN_TURNS = cuda_graphs.MAX_TURNS_CPU = loader.MIN_TURNS = 1  # as in tests/conftest.py
cuda_graphs.SIZES = 1, 8, 128
