"""OpenAI's endpoints: what is asked there becomes our requests, our events become their chunks.

Refuses to know how an answer comes about.
"""
