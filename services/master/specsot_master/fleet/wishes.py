"""What the operator asked of the ring.

Pure. Refuses to know members.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specsot.members import CommMode, Layout, Transport, TreeShape

PlacementMode = Literal["measured", "even"]

TAKE_OVER_SECONDS = (
    0.5  # seconds; whose link broke is back at once, a process that starts again not within two
)
GPU_PAGE_ROWS, CPU_PAGE_ROWS = 64, 256  # of a page where a GPU computes, and elsewhere


@dataclass(frozen=True, slots=True)
class RingConfig:
    """workers: how many share the layers when they bring no ranges of their own; of more, the others stand by
    until the ring is rebalanced, which makes at most max_stages of them (None: as many as help).
    placement: `even` cuts the layers evenly, however fast the workers are.
    take_over_after: seconds for which a lost worker without an heir may come back before the others share
             its layers.
    page_rows: None: what is fastest on the stages' devices.
    max_pages: no more pages than this are ever used, however much memory there is; of MANY_ROWS rows, where
             page_rows is None.
    """

    fingerprint: str
    model_layers: int
    workers: int = 1
    drafter: bool = True
    page_rows: int | None = None
    max_pages: int = 4096
    rows: int = 512
    layout: Layout = "batched"
    shape: TreeShape = field(default_factory=TreeShape)
    draft_timeout: float = 1.0
    transport: Transport = "grpc"
    comm_mode: CommMode = "p2p"
    placement: PlacementMode = "measured"
    max_stages: int | None = None
    take_over_after: float = TAKE_OVER_SECONDS
