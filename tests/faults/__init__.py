"""Faults by seed: a whole fleet in virtual time, its history, and a checker that knows what must hold."""
