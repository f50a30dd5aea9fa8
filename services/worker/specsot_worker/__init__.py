"""A worker: one range of the model's layers with its KV pages.

The first stage sequences and batches, the last one verifies. Refuses to know text and requests; `core`
refuses to know tensors, clocks and links.
"""
