"""The pure rules of a worker: which frames to compose, what to accept, how deep the pipeline is.

Modules of this package know no tensors, clocks or links: callers pass in times and receive values.
"""
