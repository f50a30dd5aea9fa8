"""One file per subcommand of `specsot`.

Commands do not import one another; heavy packages are imported inside the function that needs them.
"""
