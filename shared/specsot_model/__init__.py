"""The base model in torch: decoder, attention, KV pages, quantized products, CUDA graphs.

Refuses to know requests, text and other layer ranges. `core` is pure. Importing the package imports
nothing else.
"""
