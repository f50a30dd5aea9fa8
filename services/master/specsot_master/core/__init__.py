"""The pure rules of the master: plans, scheduling, admission, placement, epochs.

Refuses to know I/O, clocks, randomness and tensors: whatever changes with time is passed in.
"""
