"""Tool calls: how a model writes them, derived from its template; reading them as they come; forcing them.

Pure: no templates, tokenizers or endpoints here. `deriving` finds the form of a model, `forms` describes it,
`reading` reads an answer by it (`harmony` that of gpt-oss, `tails` objects without marks), `arguments` makes
JSON of whatever a model wrote as arguments, `schemas` holds forced calls to the functions' schemas.
"""
