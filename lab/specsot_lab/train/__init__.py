"""Training of an EAGLE-3 or DFlash head for a base model: from files of text to a head in its published
layout.

The room imports nothing of services and requests.
"""
