"""The vocabulary and the rules that all services share, as pure values and functions.

Refuses to know loops, networks, tensors, clocks and dice.
"""
