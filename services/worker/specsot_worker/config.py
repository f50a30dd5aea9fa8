"""What a worker is started with, read once.

Refuses to know torch: it is not even imported before this is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsot.members import KV_DTYPES, KvDtype, Quantization, Range, WeightFormat
from specsot.process.flags import SWITCH, Flags, layers, positive
from specsot.process.setting import Setting, add_membership, add_setting, read_member_setting
from specsot_worker.failpoints import Failpoint, failpoint


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """layers None: the master assigns a range. kv_memory in bytes.

    trace_laps: of laps that carry a traced request one is traced. failpoint: for tests.
    """

    setting: Setting
    model: Path
    master: str
    advertise: str | None
    name: str | None
    layers: Range | None
    dtype: str
    device: str
    kv_memory: int
    model_format: WeightFormat
    quantization: Quantization | None
    kv_cache_dtype: KvDtype
    batch_invariant: bool
    trace_laps: int
    failpoint: Failpoint | None


def read_config(arguments: Sequence[str] | None = None) -> WorkerConfig:
    """Exits with status 2 and one line when something is wrong."""
    flags = Flags("specsot-worker", "Runs a range of the base model's layers in a SpecSoT ring.")
    add_membership(flags)
    flags.flag("layers", layers, help="the range to run, such as 0:4; by default the master assigns one")
    kept = "numbers of KV pages: those of dtype, or int8 with a scale for each row of a head"
    flags.flag("kv-cache-dtype", default="auto", choices=KV_DTYPES, help=kept)
    same = "on a GPU: every row the same bits whatever it is computed with, at a price"
    flags.flag("batch-invariant", default="off", choices=SWITCH, help=same)
    flags.flag("trace-laps", positive, 16, "of the laps of a traced request, every how manieth is traced")
    flags.flag("failpoint", failpoint, help="for tests: [NAME:]hang@FRAME or die@FRAME")
    add_setting(flags, "127.0.0.1:0")
    given = flags.read(arguments)
    return WorkerConfig(
        setting=read_member_setting(flags, given),
        model=Path(given.model),
        master=given.master,
        advertise=given.advertise,
        name=given.name,
        layers=given.layers,
        dtype=given.dtype,
        device=given.device,
        kv_memory=given.kv_memory,
        model_format=given.model_format,
        quantization=given.quantization,
        kv_cache_dtype=given.kv_cache_dtype,
        batch_invariant=given.batch_invariant == "on",
        trace_laps=given.trace_laps,
        failpoint=given.failpoint,
    )
