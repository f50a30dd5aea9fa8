"""The top of the house: commands, Python API, local fleet. Of the product, the only importer of services."""
