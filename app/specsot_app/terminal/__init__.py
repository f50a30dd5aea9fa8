"""Shows requests and fleets at a terminal: live panels, plain text, JSON lines, a chat, a status screen.

This package does not know where events come from.
"""
