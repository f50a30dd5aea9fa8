"""Reads model directories, GGUF files and the Hub without torch: configuration, families, fingerprints.

Refuses to know layers as they are computed. Importing the package imports nothing else.
"""
