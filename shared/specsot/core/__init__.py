"""Values and rules that all services share, as pure functions.

Refuses to know loops, networks, tensors, clocks and dice.
"""
