"""Kernels for CPUs, compiled on the machine by Numba: products in few bits and whole decoder layers.

Refuses to know models and services: numbers at addresses.
"""
