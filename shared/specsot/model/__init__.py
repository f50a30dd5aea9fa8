"""The base model's room: config, weights, KV pages, attention, decoder.

Imports nothing on its own, so that `specsot.model.fingerprint` and `.config` work without torch.
"""
