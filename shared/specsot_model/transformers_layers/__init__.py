"""Runs layer ranges of families that our decoder does not know through Transformers' own modules.

This room knows Transformers' interfaces and nothing of any single family. It never runs code from a model's
directory, never patches Transformers, and captures no CUDA graphs. A family whose layers need more than their
hidden state and positions is refused in one line, before any weight is loaded.
"""
