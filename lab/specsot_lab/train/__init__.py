"""Training an EAGLE-3 or DFlash head for a base: text in, a head in the published layout out.

Refuses to know services and requests.
"""
