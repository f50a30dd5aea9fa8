"""What every service process needs around its work: options, logs, signals, metrics, spans, and membership.

Refuses to know what the service computes.
"""
