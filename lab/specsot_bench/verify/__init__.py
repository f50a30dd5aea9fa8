"""`specsot verify`: compares a fleet with Transformers, a head with its base, a build with recorded vectors.

Refuses to know how answers are served.
"""
