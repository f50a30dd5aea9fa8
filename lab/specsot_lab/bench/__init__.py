"""Measurements beside those that come with the product: clients, distance, GPUs, precision, policies.

Refuses to know how tokens come about: everything measured is the product, as its users run it,
unless a file says otherwise.
"""
