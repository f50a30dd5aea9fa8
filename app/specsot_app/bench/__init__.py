"""Measurements of the whole system, side by side in one run."""
