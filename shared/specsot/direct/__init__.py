"""Rows from GPU to GPU of one host, without a stop in the host's memory.

Refuses to know what the rows mean, and how members meet.
"""
