"""Recorded cost curves for tests of the draft policy."""

from __future__ import annotations

from specsot.members import Curve, TreeShape

# Seconds per rows, recorded: the demo model on two cores (fp32 in a fast hour, bf16, fp32), an 8B
# model on one accelerator, and a machine on which every row costs.
DEMO: Curve = (
    (1, 3.2e-3),
    (4, 3.2e-3),
    (8, 3.5e-3),
    (16, 4.0e-3),
    (32, 5.6e-3),
    (64, 7.9e-3),
    (128, 13.2e-3),
)
BF16: Curve = (
    (1, 3.35e-3),
    (4, 3.85e-3),
    (8, 4.43e-3),
    (16, 4.65e-3),
    (32, 6.65e-3),
    (64, 9.36e-3),
    (128, 15.8e-3),
)
FP32: Curve = (
    (1, 5.25e-3),
    (4, 8.06e-3),
    (8, 8.52e-3),
    (16, 9.83e-3),
    (32, 13.0e-3),
    (64, 18.2e-3),
    (128, 30.3e-3),
)
LARGE: Curve = ((1, 7.0e-3), (8, 7.1e-3), (32, 7.4e-3), (64, 7.9e-3), (128, 9.6e-3), (256, 15.0e-3))
# SmolLM2 in int8 on two cores without VNNI.
DEAR: Curve = ((1, 0.011), (2, 0.012), (4, 0.018), (8, 0.032), (16, 0.052), (64, 0.230))
STEEP: Curve = ((1, 1.0e-3), (2, 1.9e-3), (8, 7.0e-3), (64, 55e-3))
QUICK_HEAD: Curve = ((1, 0.3e-3), (4, 0.35e-3), (16, 0.5e-3), (64, 1.2e-3))
BF16_HEAD: Curve = ((1, 0.71e-3), (4, 0.95e-3), (16, 1.35e-3), (64, 3.0e-3))
FP32_HEAD: Curve = ((1, 1.23e-3), (4, 2.22e-3), (16, 3.12e-3), (64, 6.1e-3))
SLOW_HEAD: Curve = ((1, 4.0e-3), (4, 4.5e-3), (64, 12e-3))

SHAPE = TreeShape()
