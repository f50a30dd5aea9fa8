"""Bytes to values and back: one module per family of messages, each with `encode_*` and `decode_*`.

Refuses to know where bytes come from and what values are for.
"""
