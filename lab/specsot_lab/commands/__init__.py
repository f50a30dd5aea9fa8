"""The lab's words of the `specsot` command, found by their entry points in lab/pyproject.toml."""
