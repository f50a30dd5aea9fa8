"""`python -m tests.faults SEED` tells one seed's run line by line; `--minutes M` tries random seeds so long,
`--seeds N` so many, in so many `--processes`.

The exit status says whether every rule held; a seed that broke one is printed, and does the same again, to
the last moment.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

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


def hunt(minutes: float, count: float, processes: int) -> int:
    """So long, or so many."""
    begun, seeds = time.monotonic(), random.SystemRandom()
    begins, tried, broken, spent = 0, 0, 0, 0.0
    under_way = set[Future[tuple[int, list[str], float]]]()
    with ProcessPoolExecutor(processes) as pool:
        while True:
            while (
                begins < count and len(under_way) < 2 * processes and time.monotonic() < begun + 60 * minutes
            ):
                under_way.add(pool.submit(measure, seeds.randrange(1 << 31)))
                begins += 1
            if not under_way:
                break
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for seed, found, seconds in (one.result() for one in done):
                tried, broken, spent = tried + 1, broken + bool(found), spent + seconds
                if found:
                    print(f"make faults SEED={seed}", *found[:3], sep="\n  ", flush=True)
                elif tried % 50 == 0:
                    print(f"{tried} seeds", flush=True)
    print(f"{tried} seeds, {broken} broke a rule; {spent / max(tried, 1):.1f} CPU seconds each")
    return bool(broken)


def measure(seed: int) -> tuple[int, list[str], float]:
    """The seed, its verdict, and CPU seconds."""
    begun = time.process_time()
    return seed, verdict(seed), time.process_time() - begun


def verdict(seed: int) -> list[str]:
    """What is wrong with it; a run that does not end is."""
    try:
        return check(play(draw(seed), seed), answers())
    except Exception as error:
        return [f"the run itself failed: {error!r}"]


def main() -> int:
    flags = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    flags.add_argument("seed", type=int, nargs="?", default=0)
    flags.add_argument("--minutes", type=float, default=math.inf)
    flags.add_argument("--seeds", type=float, default=math.inf)
    flags.add_argument("--processes", type=int, default=2)
    given = flags.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    if min(given.minutes, given.seeds) < math.inf:
        return hunt(given.minutes, given.seeds, given.processes)
    return tell(given.seed)


if __name__ == "__main__":
    sys.exit(main())
