"""Bytes to values and back: one module per family of messages, each with `encode_*` and `decode_*`.

Nothing in this package depends on where bytes come from or what values are used for.
"""
