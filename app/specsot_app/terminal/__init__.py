"""Showing a request to people and programs: live panels, plain text, JSON lines.

Refuses to know where events come from.
"""
