"""Hypothesis strategies for every value that travels, by what it is about.

Know nothing of protobuf: only what the values themselves allow.
"""
