"""Moves messages between members and answers clients: links, gRPC, ZMQ, NCCL, TLS, the wire format.

Nothing in this package depends on what a message means to its receiver.
"""
