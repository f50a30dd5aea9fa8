"""What the process that members of fleets are forked from has imported: see `forked`."""

from importlib import import_module

from specsot.service.habits import settle_habits

settle_habits()
for name in ("drafter.drafter", "drafter.loader", "worker.worker", "worker.loader", "master.master"):
    import_module(f"specsot_{name}")
