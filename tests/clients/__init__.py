"""Real clients against a ring of their own: `make clients`."""
