"""The lab: its measurements, its judgement of answers, its training."""
