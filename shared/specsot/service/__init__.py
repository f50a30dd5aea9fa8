"""Common parts of all service processes: options, logs, signals, metrics, spans, membership.

Nothing in this package depends on what a service computes.
"""
