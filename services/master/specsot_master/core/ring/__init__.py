"""The ring: layer placement, epochs, admission by KV pages, the prefix tree, the queue of requests."""
