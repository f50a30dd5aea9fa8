"""Tool calls: how a model writes them, how they are read as they arrive, and how they are forced.

The package is pure: it knows no templates, tokenizers or endpoints. `deriving` derives a model's form from
its template, and `forms` describes forms. `reading` reads an answer in a form, `harmony` reads that of
gpt-oss, and `tails` reads objects without marks. `arguments` makes JSON of whatever a model wrote as
arguments. `schemas` restricts forced calls to the functions' schemas.
"""
