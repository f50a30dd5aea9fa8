"""What a frame does to KV rows and to the states of gated delta layers, as pure functions.

Refuses to know loops, networks, tensors, clocks and random numbers.
"""
