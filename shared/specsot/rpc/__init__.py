"""gRPC: servers, channels, links, and the error tree as statuses.

Refuses to know models, tensors' meaning and requests' lives.
"""
