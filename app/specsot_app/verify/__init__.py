"""`specsot verify`: a fleet's answers against Transformers', a head against its base, a build against vectors.

Refuses to know how answers are served.
"""
