"""Checks that a user can run: whether base, head and decoding do what they must."""
