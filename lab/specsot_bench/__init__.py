"""A bench for models: `specsot bench quick` and `full`, `specsot verify`, and EAGLE for models in memory.

The package is a part of the distribution `specsot`, so that these commands and `specsot.eagle` need no second
install. Refuses to know how a fleet works: it asks, reads clocks, and writes tables. `core/` is pure.
"""
