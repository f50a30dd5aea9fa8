"""The application: commands, Python API, local fleets. The only part of the product that imports services."""
