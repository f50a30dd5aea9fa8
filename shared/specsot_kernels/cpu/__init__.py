"""Kernels for CPUs, compiled on the machine by Numba: products with 8- and 4-bit weights, and whole decoder
layers.

They know neither models nor services: their arguments are numbers and memory addresses.
"""
