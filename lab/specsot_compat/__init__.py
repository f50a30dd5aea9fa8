"""Names of other systems: AITER's and SGLang's functions, and the HTTP routes of SpecSoT's predecessors.

The product never imports this package by name: the routes are entry points of `specsot.http_routes`, and
`specsot.aiter` re-exports the functions.
"""
