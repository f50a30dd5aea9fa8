"""The base model: config, weights, KV pages, attention, decoder.

Refuses to know requests, text and other ranges. Imports nothing on its own: `fingerprint` and `config` work
without torch.
"""
