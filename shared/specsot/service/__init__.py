"""Common parts of all service processes: options, logs, signals, metrics, spans, membership.

Refuses to know what the service computes.
"""
