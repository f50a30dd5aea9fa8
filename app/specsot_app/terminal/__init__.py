"""Shows requests and fleets at a terminal: live panels, plain text, JSON lines, a chat, a status screen.

Refuses to know where events come from.
"""
