"""What the kernels for CPUs and their callers agree on: fields of tables, sizes, and the processor's
instructions.

A weight is stored in panels of 16 outputs. A panel is divided by inputs into groups, and a group into steps
of four inputs. Panels are not the blocks of a GGUF file, which have 32 or 256 inputs of one output.

Importing this module does not import torch, and imports Numba only if the user has configured it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from platform import machine

from llvmlite import binding

from specsot_kernels.errors import UnsupportedProcessor

# How many numbers a vector has; also the outputs of a panel.
LANES = 16
# Bytes of a vector of fp32 numbers, of the 8-bit weights of a panel's step, and of a cache line.
BYTES = 64
# Inputs of a group of 4- and 6-bit weights. The activations that a group multiplies share a scale.
GROUP = 32
# Inputs of a group of 8-bit weights.
LONG_GROUP = 64
# The largest finite fp16 number.
LARGEST_HALF = 65504.0
# ggml's numbers of its types Q4_K and Q6_K, 4- and 6-bit weights whose scales have few bits, too. They are
# also the formats (FORMAT) of weights that are packed from such blocks without loss.
Q4_K, Q6_K = 12, 14
# Inputs of a GGUF block Q4_K or Q6_K.
K_INPUTS = 256
# By the weights' format, bytes of a group of a panel: the lower 4 bits of the weights, the upper 2 bits in
# Q6_K, and then a number of each output for the group's scale and one for its minimum value (in Q6_K for the
# scale of the second half): fp16, or a byte in Q4_K and Q6_K. A group of 8-bit weights has nothing else.
GROUP_BYTES = {
    8: LANES * LONG_GROUP,
    4: 4 * BYTES + 4 * LANES,
    Q4_K: 4 * BYTES + 2 * LANES,
    Q6_K: 6 * BYTES + 2 * LANES,
}
# By the weights' format, bytes that precede each 8 groups of a panel: fp16 numbers by which the groups'
# scales, and in Q4_K those by which their minimum values, are multiplied.
HEAD_BYTES = {8: 0, 4: 0, Q4_K: 4 * LANES, Q6_K: 2 * LANES}
# Bytes of a barrier. Three counters, each in a cache line of its own: threads that have arrived, completed
# barriers, threads that sleep.
BARRIER_BYTES = 3 * BYTES
# Rows of an AMX tile. A tile of weights holds one group of one panel, in Q6_K half a group.
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
# By ggml's number of a type, the format that holds its weights without loss. The first two types are Q4_0 and
# Q4_1.
LOSSLESS_TYPES = {2: 4, 3: 4, Q4_K: Q4_K, Q6_K: Q6_K}


# Linux's number of the system call arch_prctl on x86-64, of its request for permission to use a feature
# (ARCH_REQ_XCOMP_PERM), and of the feature that holds AMX tiles (XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _has_amx() -> bool:
    """Ask Linux for permission to use AMX for the whole process, if the processor has AMX. Return whether the
    permission was granted; False on other processors and other operating systems.
    """
    has_tiles = INSTRUCTIONS == "avx512vnni" and {"amx-tile", "amx-int8"} <= _features()
    if not has_tiles or sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


# Whether this process may use AMX.
AMX = _has_amx()
# Whether weights of LOSSLESS_TYPES keep the numbers of the GGUF file on this processor. Otherwise they are
# rounded to 8 bits, as the weights of all other types are. Chosen by measurement, compared with 8 bits:
# * On AVX2, products of 1 to 64 rows take 0.58 to 1.04 times as long.
# * With AVX-512 VNNI and without AMX (an AMD EPYC, Zen 4), whole steps of a 1.5B model with 1 to 4 rows take
#   0.54 to 0.78 times as long, with 8 rows 1.03 to 1.12 times, with 16 to 64 rows 1.3 to 1.5 times.
# * With AMX, products of one row take 0.65 to 1.0 times as long, but those of 8 rows 1.2 to 1.8 times, and
#   those of 64 rows 2.3 to 3.7 times.
# * AVX-VNNI was not measured.
_KEEPS_FILE_NUMBERS = INSTRUCTIONS == "avx2" or (INSTRUCTIONS == "avx512vnni" and not AMX)
# Those of LOSSLESS_TYPES that are packed without loss on this processor: all or none.
ENABLED_LOSSLESS_TYPES = LOSSLESS_TYPES if _KEEPS_FILE_NUMBERS else {}
# The formats that the kernel can compute on this processor: 8 and 4, or all of GROUP_BYTES. Formats that are
# not used are left out, because they take time to compile: on a Xeon with VNNI, compiling the kernel takes
# 11.0 s of processor time with the formats 8 and 4, and 14.4 s with all of them.
FORMATS = (8, 4, *(form for form in ENABLED_LOSSLESS_TYPES.values() if form != 4))

# The constants below are fields of tables of int64 numbers, by their offset in bytes. Unless a comment says
# otherwise, a field holds the address of an array of fp32 numbers.

# A product's table. WEIGHT: the packed weight; see `running.PackedWeight`. OUTPUT_SCALES: the scales of its
# outputs (8 bits only). BIAS: zeros if there is none. INPUTS, OUTPUTS: the numbers of inputs and outputs.
# FORMAT, not an address: how the weights are packed. 8 is 8 bits, 4 is 4 bits with fp16 scales and minimum
# values, Q4_K and Q6_K are as ggml has them. PANEL_BYTES: bytes of a panel.
WEIGHT, OUTPUT_SCALES, BIAS, INPUTS, OUTPUTS, FORMAT, PANEL_BYTES = range(0, 56, 8)
# Number of fields of a product's table.
PRODUCT_FIELDS = 7
# A layer's table. QKV, OUT, GATE_UP, DOWN: its four products' tables. INPUT_NORM, MLP_NORM, Q_NORM, K_NORM:
# the norms' weights; those of the head norms, and of the first norm, may be 0 (none).
QKV, OUT, GATE_UP, DOWN = range(0, 4 * 8 * PRODUCT_FIELDS, 8 * PRODUCT_FIELDS)
INPUT_NORM, MLP_NORM, Q_NORM, K_NORM = range(DOWN + 8 * PRODUCT_FIELDS, DOWN + 8 * PRODUCT_FIELDS + 32, 8)
# Number of fields of a layer's table.
LAYER_FIELDS = DOWN // 8 + PRODUCT_FIELDS + 4
# A frame's table. A single product uses the first nine fields and those from X on.
# * Numbers, not addresses: ROWS, how many rows the frame has; EPS, the norms' epsilon, and QUERY_SCALE, by
#   which queries are multiplied (both the bits of an fp32 number); HEADS, KV_HEADS, HEAD_DIM, PAGE_ROWS (rows
#   of a KV page); VISIBLE_HEADS, see VISIBLE_COLUMNS; BEST and COUNT, of a TOP_K: how many outputs there are,
#   and how many are chosen; LAYERS_APART and SCORES_APART, bytes from one layer's keys to the next layer's,
#   and from one query's scores to the next query's.
# * THREAD, THREADS, SYSTEM: addresses of functions; see `running._entries`. BARRIER: the team's barrier.
# * QUANTIZED, ROW_SCALES, CORRECTIONS, NORMED_ROW: scratch memory for quantized rows, their scales and
#   corrections (see `steps.quantize_row`), and one normed row of each thread.
# * HIDDEN [rows, hidden size]: the hidden states, which layers update in place. X: the input of a product,
#   and of a layer without a first norm. OUTPUT: the result of a product. NORM: weight of the norm of X, or 0.
# * KEYS, VALUES: the pages of the present layer, in fp16 [pages, KV heads, page rows, head size]. SLOTS:
#   int64 [rows], where a row's keys and values are stored; negative: nowhere. POSITIONS: int64 [rows].
#   ROTATIONS: by position, cosines and sines of each number of a head.
# * VISIBLE_COLUMNS: five int64 for each row (and each of VISIBLE_HEADS heads). A column is the KV of one
#   position. The five are: the address of the offsets (bytes in the pages, int64) of the first columns that
#   the row sees, their number, the same two for the columns after these, and by how many positions the query
#   is rotated towards the first columns.
# * QUERY_TABLES, ROTATED, SCORES, VALUE_SUMS: each thread's memory for the queries that it processes
#   together: their tables (below), rotated copies, attention scores, and second sums of values.
# * PROJECTED, ATTENDED, INNER: scratch memory for a layer's queries, keys and values, its attention, and the
#   inner rows of its MLP.
# * LOG_PROBABILITIES, TOKENS (int64), OFFSETS (int64): of a TOP_K, see `steps.choose`.
# * TAPS: for each layer the address of the table of a product of its input, or 0, and the address of the
#   result. It is 0 if no layer has a tap.
(ROWS, EPS, THREAD, THREADS, BARRIER, QUANTIZED, ROW_SCALES, CORRECTIONS, NORMED_ROW,
 HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE_ROWS, KEYS, VALUES, LAYERS_APART, SLOTS, POSITIONS, ROTATIONS,
 VISIBLE_COLUMNS, VISIBLE_HEADS, QUERY_TABLES, ROTATED, SCORES, SCORES_APART, VALUE_SUMS,
 PROJECTED, ATTENDED, INNER,
 X, OUTPUT, NORM, BEST, COUNT, LOG_PROBABILITIES, TOKENS, OFFSETS, TAPS, SYSTEM,
 QUERY_SCALE) = range(0, 41 * 8, 8)  # fmt: skip
# Number of fields of a frame's table.
FRAME_FIELDS = 41
# What a call computes: a product (MULTIPLY), a product and the COUNT best of its BEST outputs (TOP_K), or the
# keys and values of a layer (STORE_KV). A positive number runs so many layers one after another.
MULTIPLY = 0
TOP_K = -1
STORE_KV = -2
# A query table describes one row's queries of one KV head; they follow one another in memory.
# * The field at offset 0: the first query, rotated for the first columns.
# * FIRST_COLUMNS, FIRST_COUNT, LATER_COLUMNS, LATER_COUNT: the first four numbers of VISIBLE_COLUMNS.
# * QUERY: the first query, unrotated.
# * WEIGHTS: its scores, with 1 / the sum of weights after them.
# * FIRST_SUMS, SECOND_SUMS: two partial sums of values, of columns with even and with odd numbers.
# * NEXT_COLUMNS, NEXT_COUNT: the first columns of the row that is processed next in this place, which are
#   prefetched; the count is 0 if another row has read them.
(FIRST_COLUMNS, FIRST_COUNT, LATER_COLUMNS, LATER_COUNT, QUERY, WEIGHTS, FIRST_SUMS, SECOND_SUMS,
 NEXT_COLUMNS, NEXT_COUNT) = range(8, 11 * 8, 8)  # fmt: skip
# Bytes of a query table.
QUERY_TABLE_BYTES = 11 * 8
# Bytes of the four quantized inputs of a step of an 8-bit product.
STEP_BYTES = 8 if WIDE_INPUTS else 4
# Rows and columns that attention processes together: the keys of so many columns stay in the first-level
# cache.
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 4, 64
# Rows. More rows than `steps.ROWS_OF_ONE`, up to so many, are split evenly over two passes (more with AVX2,
# whose tiles have fewer rows). Chosen by weight bandwidth: 4 + 4 rows read 36 GB/s, 6 + 2 rows 33, and a
# single row 35.
ROWS_OF_TWO = 8
