"""The master: takes requests, plans them, schedules their sequences on a ring of workers, streams
the answers.

Refuses to know tensors, layers and draft models.
"""
