"""Bytes to values and back: one module per family of messages, each with `encode_*` and `decode_*`.

Refuses to know who sends, when and over what. Whatever a peer sends decodes or raises WireError;
what a client asks decodes or raises InvalidRequest. Only `tensors` and `carry` need torch.
"""
