"""Reference vectors of our own making: plain torch without caches, against which the product is checked."""
