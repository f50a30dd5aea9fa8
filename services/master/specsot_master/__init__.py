"""The master: takes requests, plans them, schedules their sequences on a ring, streams the answers.

This package must not import tensors, layers or draft models.
"""
