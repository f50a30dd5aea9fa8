"""Values and rules that all services share, as pure functions.

Nothing in this package uses an event loop, a network, tensors, a clock or a source of random numbers.
"""
