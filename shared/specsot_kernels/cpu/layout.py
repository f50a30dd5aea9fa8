"""What the kernels for CPUs and their callers agree on: fields of tables, sizes, and the processor's
instructions.

Importing this module imports neither Numba nor torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from platform import machine

from llvmlite import binding

from specsot_kernels.errors import UnsupportedProcessor

# Numbers of a vector.
LANES = 16
# Bytes of a vector of floats, of the 8-bit weights of one step, and of a cache line.
BYTES = 64
# Inputs of a group of weights of 4 and 6 bits. The activations that a group multiplies share a scale.
GROUP = 32
# Activations that share a scale with 8-bit weights.
LONG_GROUP = 64
# The largest finite fp16 number.
LARGEST_HALF = 65504.0
# ggml's numbers of its types Q4_K and Q6_K. A product's table has them in place of bits if its weight was
# stored in such blocks: 4- or 6-bit weights, whose groups have scales of few bits.
Q4_K, Q6_K = 12, 14
# Inputs of a block Q4_K or Q6_K.
K_INPUTS = 256
# By the entry BITS, bytes of a group of 16 outputs: the lower 4 bits of the weights, the upper 2 bits in
# Q6_K, and then a number of each output for the group's scale and one for its minimum value (in Q6_K for the
# scale of the second half): fp16, or a byte in Q4_K and Q6_K. A group of 8-bit weights has nothing else.
GROUP_BYTES = {
    8: LANES * LONG_GROUP,
    4: 4 * BYTES + 4 * LANES,
    Q4_K: 4 * BYTES + 2 * LANES,
    Q6_K: 6 * BYTES + 2 * LANES,
}
# By the entry BITS, bytes that precede each 8 groups of 16 outputs: fp16 numbers by which the groups' scales,
# and in Q4_K those by which their minimum values, are multiplied.
HEAD_BYTES = {8: 0, 4: 0, Q4_K: 4 * LANES, Q6_K: 2 * LANES}
# Bytes of a barrier. Three counters, each in a cache line of its own: threads that have arrived, completed
# barriers, threads that sleep.
BARRIER_BYTES = 3 * BYTES
# Rows of an AMX tile. A tile of weights holds one group of one block of outputs.
TILE_ROWS = 16


def is_configured() -> bool:
    """Return whether the user has configured Numba, by a variable or by a file in the working directory. Then
    kernels may have to be compiled for another processor, or otherwise than usual.
    """
    names = (name for name in os.environ if name.startswith("NUMBA_"))
    return any(name != "NUMBA_CACHE_DIR" for name in names) or Path(".numba_config.yaml").exists()


def _features() -> frozenset[str]:
    """Return the features of the processor that Numba compiles for.

    Without a list of features, they are those of this machine; if Numba was only told the name of a
    processor, they are AVX2, F16C and FMA for "haswell", and none for other names.
    """
    listed = named = None
    if is_configured():
        from numba.core import config

        listed, named = getattr(config, "CPU_FEATURES", None), getattr(config, "CPU_NAME", None)
    # NUMBA_CPU_NAME is set.
    if listed is None and named:
        return frozenset(("avx2", "f16c", "fma") if named == "haswell" else ())
    if listed is None:
        return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)
    return frozenset(feature[1:] for feature in listed.split(",") if feature.startswith("+"))


def _instructions() -> str:
    """Return which instructions compute integer dot products. Raises UnsupportedProcessor on an x86 without
    AVX2.

    The result is "avx512vnni", "avxvnni", "avx2", or "any" on processors that are no x86. Later ones are
    chosen only if the processor lacks the earlier ones.
    """
    has = _features()
    if {"avx512vnni", "avx512bw", "avx512vl"} <= has:
        return "avx512vnni"
    if "avxvnni" in has:
        return "avxvnni"
    if {"avx2", "fma", "f16c"} <= has:
        return "avx2"
    # Without these features, LLVM would emit calls of functions that no library provides.
    if machine().lower() in ("x86_64", "amd64"):
        raise UnsupportedProcessor("int8 and int4 weights need a processor with AVX2")
    return "any"


# The instructions that compute integer dot products on this processor.
INSTRUCTIONS = _instructions()
# On AVX2, 8-bit products read their inputs as 16-bit numbers.
WIDE_INPUTS = INSTRUCTIONS == "avx2"
# By ggml's number of a type whose numbers a packed weight can hold as they are: the entry BITS of its table.
# The first two types are Q4_0 and Q4_1.
KEEPABLE_TYPES = {2: 4, 3: 4, Q4_K: Q4_K, Q6_K: Q6_K}
# The types whose numbers are kept on this processor. Others are rounded to 8 bits. Chosen by measurement,
# compared with 8 bits: on AVX2, products of 1 to 64 rows take 0.58 to 1.04 times as long; with AMX, those of
# one row take 0.65 to 1.0 times as long, but those of 8 rows 1.2 to 1.8 times, and those of 64 rows 2.3 to
# 3.7 times. AVX-VNNI and AVX-512 VNNI without AMX were not measured.
KEPT_TYPES = KEEPABLE_TYPES if INSTRUCTIONS == "avx2" else {}
# The entries BITS that the kernel can compute on this processor. On a Xeon with VNNI, compiling it takes
# 11.0 s of processor time with these, and 14.4 s with all of GROUP_BYTES.
FORMS = (8, 4, *(bits for bits in KEPT_TYPES.values() if bits != 4))


def _has_amx() -> bool:
    """Return whether AMX can be used; a process must ask Linux for permission (arch_prctl), which this
    function does.
    """
    able = INSTRUCTIONS == "avx512vnni" and {"amx-tile", "amx-int8"} <= _features()
    return able and sys.platform == "linux" and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


# Whether this process may use AMX.
AMX = _has_amx()

# Fields of a product's table. WEIGHT, FACTORS, BIAS: addresses of the packed weight, of the scales of its
# outputs (8 bits only) and of its bias, which is zeros if there is none. INPUTS, OUTPUTS: sizes. BITS: 8, 4,
# Q4_K or Q6_K. APART: bytes from the weights of 16 outputs to those of the next 16.
WEIGHT, FACTORS, BIAS, INPUTS, OUTPUTS, BITS, APART = range(0, 56, 8)
# Numbers of a product's table.
PRODUCT = 7
# Fields of a layer: four products, and addresses of the norms' weights; those of the head norms may be 0
# (none).
QKV, OUT, GATE_UP, DOWN = range(0, 4 * 8 * PRODUCT, 8 * PRODUCT)
INPUT_NORM, MLP_NORM, Q_NORM, K_NORM = range(DOWN + 8 * PRODUCT, DOWN + 8 * PRODUCT + 32, 8)
# Numbers of a layer's table.
LAYER = DOWN // 8 + PRODUCT + 4
# Fields of a frame's table; a single product uses the first nine and those from X on. All are addresses of
# arrays except the counts ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE_ROWS, SEEN_BY, BEST and COUNT, the numbers
# EPS and FACTOR, by which queries are multiplied, and:
# * X is the input of a product, and of a layer without a first norm.
# * LAYERS_APART and SCORES_APART are bytes from one layer's keys to the next layer's, and from one query's
#   scores to the next query's.
# * THREAD, THREADS and SYSTEM are addresses of functions; see `running._entries`. MEETING is the team's
#   barrier.
# * SHORT, SCALES, SUMS and WIDE are scratch memory for quantized rows, their scales and corrections, and one
#   normed row of each thread.
# * SIGHT has five numbers for each row (and each of SEEN_BY heads): the address of the offsets of the first
#   columns that the row sees, their number, the same two for the columns after these, and by how many
#   positions the query is rotated towards the first columns.
# * TAPS has for each layer a product of its input, or 0, and where its result is written. It is 0 if no layer
#   has a tap.
# * ASKED, TURNED, SCORES and EVEN are each thread's memory for the queries that it processes together.
(ROWS, EPS, THREAD, THREADS, MEETING, SHORT, SCALES, SUMS, WIDE,
 HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE_ROWS, KEYS, VALUES, LAYERS_APART, SLOTS, POSITIONS, TURNS,
 SIGHT, SEEN_BY, ASKED, TURNED, SCORES, SCORES_APART, EVEN, PROJECTED, ATTENDED, INNER,
 X, OUTPUT, NORM, BEST, COUNT, CHANCES, TOKENS, OFFSETS, TAPS, SYSTEM,
 FACTOR) = range(0, 41 * 8, 8)  # fmt: skip
# Numbers of a frame's table.
FRAME = 41
# What a call computes: a product (MULTIPLY), the COUNT best of its BEST outputs (CHOOSE), or the keys and
# values of a layer (REMEMBER). A positive number runs so many layers one after another.
MULTIPLY = 0
CHOOSE = -1
REMEMBER = -2
# Fields that describe one row's queries of one KV head; the row's other queries follow the first one in
# memory.
# * The field at offset 0 is the address of the first query, rotated for the first columns.
# * LEAD, LEAD_COUNT, TAIL and TAIL_COUNT are the row's sight without its last field.
# * QUERY is the address of the first query, unrotated.
# * WEIGHTS is the address of its scores, with 1 / the sum of weights after them.
# * ODD and OTHER are the addresses of two partial sums of values.
# * SOON and SOON_COUNT are the first columns of the row that is processed next in this place, to be
#   prefetched if no other row has read them.
LEAD, LEAD_COUNT, TAIL, TAIL_COUNT, QUERY, WEIGHTS, ODD, OTHER, SOON, SOON_COUNT = range(8, 11 * 8, 8)
# Bytes of these fields.
ASKING = 11 * 8
# Bytes of four inputs of an 8-bit product.
WORD = 8 if WIDE_INPUTS else 4
# Rows and columns that attention processes together: the keys of so many columns stay in the first-level
# cache.
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 4, 64
# Rows. More rows than `steps.ROWS_OF_ONE`, up to so many, are split evenly over two passes. Chosen by weight
# bandwidth: 4 + 4 rows read 36 GB/s, 6 + 2 rows 33, and a single row 35.
ROWS_OF_TWO = 8
