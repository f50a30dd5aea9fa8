"""Measures that are computed from answers: pure functions of their texts."""
