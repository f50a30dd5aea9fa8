"""Measurements beside those that come with the product: clients, distance, GPUs, precision, policies."""
