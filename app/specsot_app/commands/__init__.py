"""One file per word of the `specsot` command.

Refuses to know each other; heavy rooms are imported inside the function that needs them.
"""
