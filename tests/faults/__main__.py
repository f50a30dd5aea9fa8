"""`python -m tests.faults SEED` tells one seed's run line by line; `--minutes M` tries random seeds so long.

The exit status says whether every rule held; a seed that broke one is printed, and does the same again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import structlog

from tests.faults.campaign import answers, draw, play
from tests.faults.checker import check
from tests.faults.history import Got, Lapped, Worked


def tell(seed: int) -> int:
    campaign = draw(seed)
    history = play(campaign, seed)
    for at, entry in history:
        if not isinstance(entry, Got | Lapped | Worked):
            print(f"{at:9.3f}  {entry}")
    print(f"seed {seed}: {campaign.shape}", *campaign.faults, sep="\n  ")
    found = check(history, answers())
    print(f"{len(history)} entries,", "every rule held" if not found else "rules broken:", *found, sep="\n  ")
    return bool(found)


def hunt(minutes: float) -> int:
    until, seeds, broken = time.monotonic() + 60 * minutes, random.SystemRandom(), list[int]()
    tried = 0
    while time.monotonic() < until:
        seed = seeds.randrange(1 << 31)
        found = check(play(draw(seed), seed), answers())
        tried += 1
        if found:
            broken.append(seed)
            print(f"make faults SEED={seed}", *found[:3], sep="\n  ", flush=True)
    print(f"{tried} seeds, {len(broken)} broke a rule")
    return bool(broken)


def main() -> int:
    flags = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    flags.add_argument("seed", type=int, nargs="?", default=0)
    flags.add_argument("--minutes", type=float)
    given = flags.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    return hunt(given.minutes) if given.minutes else tell(given.seed)


if __name__ == "__main__":
    sys.exit(main())
