"""One file per subcommand of `specsot`.

Refuses to know each other; heavy rooms are imported inside the function that needs them.
"""
