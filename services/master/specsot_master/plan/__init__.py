"""What a request wants next, given what happened: pure decisions, no doing.

Refuses to know tensors, tokenizers, transports and clocks.
"""

from specsot_master.plan.answer import TextPiece
from specsot_master.plan.commands import (
    CloseSequence,
    Command,
    FailRequest,
    OpenAnswer,
    OpenBranch,
    OpenSkeleton,
)
from specsot_master.plan.limits import (
    POINT_TOKENS,
    check_plan,
    mode_of,
    plan_limit,
    rules_of,
    skeleton_limit,
)
from specsot_master.plan.request import RequestPlan

__all__ = [
    "POINT_TOKENS",
    "CloseSequence",
    "Command",
    "FailRequest",
    "OpenAnswer",
    "OpenBranch",
    "OpenSkeleton",
    "TextPiece",
    "RequestPlan",
    "check_plan",
    "mode_of",
    "plan_limit",
    "rules_of",
    "skeleton_limit",
]
