"""Where a kernel's threads wait for each other."""

import ctypes
import itertools
import threading
from importlib.util import find_spec

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")

THREADS, TIMES = 3, 200


def test_a_waiting_thread_sleeps_and_none_continues_before_all_have_arrived() -> None:
    import numba

    from specsot_kernels.cpu import layout
    from specsot_kernels.cpu import vectors as v

    kind = numba.types.void(numba.types.int64, numba.types.int64, numba.types.int64)
    met = numba.cfunc(kind)(lambda place, threads, system: v.meet(place, threads, system)).ctypes
    lines = np.zeros(layout.BARRIER_BYTES // 4 + 16, dtype=np.int32)
    first = -lines.ctypes.data % layout.BYTES // 4
    asleep = lines[first + 2 * layout.BYTES // 4 :]
    system = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
    done = [0] * THREADS

    def meet(number: int) -> None:
        for turn in range(TIMES):
            met(lines[first:].ctypes.data, THREADS, system)
            assert min(done) >= turn, "all have done what comes before"
            done[number] += 1

    late, *early = (threading.Thread(target=meet, args=(n,), daemon=True) for n in range(THREADS))
    for one in early:
        one.start()
    looks = itertools.count()
    while asleep[0] < THREADS - 1:
        assert next(looks) < 10**7, "they spin"
    assert done == [0] * THREADS
    late.start()
    for one in (late, *early):
        one.join(10)
    assert done == [TIMES] * THREADS
