"""`specsot verify`: fleets' answers against Transformers', a head against its base, builds against vectors.

Refuses to know how answers are served.
"""
