"""Quality and speed of planned answers against direct ones, category by category.

Refuses to know rings and drafters: it asks a fleet, keeps what came as lines of a file, and sums them up.
"""
