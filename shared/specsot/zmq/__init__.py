"""ZMQ: links between members that begin with a hello over gRPC and then carry their bytes without it.

Refuses to know what the bytes mean. Over TCP everything is encrypted by CURVE, with keys made for one link.
"""
