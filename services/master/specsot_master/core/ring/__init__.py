"""The ring: layer placement, epochs, admission by KV pages, the prefix tree, and the queue of requests."""
