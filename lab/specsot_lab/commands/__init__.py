"""The lab's commands of `specsot`, which are found by their entry points in lab/pyproject.toml."""
