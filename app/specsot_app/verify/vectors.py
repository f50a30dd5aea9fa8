"""`specsot verify --vectors DIR`: everything a directory of reference vectors recorded, line by line.

Refuses to know what is compared; it loads, asks for the checks, and says how they went.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from specsot.errors import ModelError, SpecsotError
from specsot.members import Range
from specsot.model.config import read_config
from specsot.model.decoder import Decoder
from specsot_app.verify.compare import Check, check_same
from specsot_app.verify.numbers import check_base, check_head, check_steps
from specsot_app.verify.record import ReferenceCase, read_case
from specsot_app.verify.runs import check_replays, check_runs
from specsot_drafter.heads.eagle import EagleHead
from specsot_drafter.heads.loading import load_head

HOLDS, DIFFERS, UNREADABLE = 0, 1, 2


def check(directory: Path) -> int:
    """Print one line per check; 0: all hold, 1: some do not, 2: the directory cannot be checked."""
    counts = {True: 0, False: 0}
    try:
        for one in checks(directory):
            print(one, flush=True)
            counts[one.difference is None] += 1
    except SpecsotError as error:
        print(f"specsot: {error}", file=sys.stderr)
        return UNREADABLE
    print(f"{counts[True]} of {sum(counts.values())} checks hold")
    return DIFFERS if counts[False] else HOLDS


@torch.inference_mode()
def checks(directory: Path) -> Iterator[Check]:
    """All checks of a directory, one by one, in fp32. Raises ModelError for what cannot be read."""
    case = read_case(directory)
    head = load_head(
        case.head, case.base, torch.float32, "cpu", allow_pickle_bin=True, allow_pickle_base=True
    )
    head.positions = sys.maxsize  # the reference drafts on behind the end of the base's context
    layers = Range(0, read_config(case.base).layers)
    base = Decoder.load(case.base, layers, torch.float32, "cpu", allow_pickle_bin=True)
    refuse_strangers(case, base)
    yield from check_kind(case, head)
    yield from check_base(case, base, head)
    yield from check_head(case, head)
    yield from check_steps(case, head)
    yield from check_runs(case, base, head)
    yield from check_replays(case, base, head)


def check_kind(case: ReferenceCase, head: EagleHead) -> Iterator[Check]:
    """The head's family and its taps, where they were recorded."""
    if case.algo is not None:
        kind = "eagle3" if case.algo == "eagle3" else "eagle1"
        yield check_same(f"head is {case.algo}", [head.kind], [kind])
    if case.taps is not None:
        yield check_same("aux_layers", head.taps, case.taps)


def refuse_strangers(case: ReferenceCase, base: Decoder) -> None:
    """Recorded ids must be ids of the base."""
    fed = [*(prompt.tokens for prompt in case.prompts), *(prompt.greedy for prompt in case.prompts)]
    fed += [(*each.tree.tree.tokens, each.bonus) for run in case.sampling for each in run.rounds]
    strange = next((token for tokens in fed for token in tokens if not 0 <= token < base.config.vocab), None)
    if strange is not None:
        raise ModelError(f"{case.directory}: token {strange} is recorded, the base has {base.config.vocab}")
