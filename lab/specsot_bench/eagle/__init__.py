"""Speculative decoding for models in memory: no services, no event loop, token ids in and out.

Reached as `specsot.eagle`. The engines are those of the services, called one after the other. Refuses to know
text, links and clocks.
"""

from specsot_bench.core.eagle_inputs import EagleConfig
from specsot_bench.eagle.api import Eagle
from specsot_bench.eagle.generation import EagleBenchmark, EagleStats, Piece, SequenceStats

__all__ = ["Eagle", "EagleBenchmark", "EagleConfig", "EagleStats", "Piece", "SequenceStats"]
