"""The top of the house: commands, Python API, local fleet, benchmarks. The only importer of services."""
