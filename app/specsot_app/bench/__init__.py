"""`specsot bench quick` and `full`, and what the lab's measurements share with them.

Refuses to know how a fleet works: it asks, reads clocks, and writes tables. `core/` is pure.
"""
