"""Moves messages between members and answers clients: links, gRPC, ZMQ, NCCL, TLS, the wire format.

Refuses to know what a message means to who gets it.
"""
