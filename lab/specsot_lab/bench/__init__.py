"""Measurements in addition to those that come with the product: clients, distance, GPUs, precision, policies.

This package does not know how tokens are computed: everything that it measures is the product as its users
run it, unless a file says otherwise.
"""
