"""A worker: one range of the model's layers with its KV pages.

The first stage schedules and batches, the last stage verifies. This package knows no text and no requests;
`core` knows no tensors, clocks or links either.
"""
