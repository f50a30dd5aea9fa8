"""Pure parts of the app: requests, presets, devices and layer ranges, what screens and reports show.

They use no event loops, networks, tensors, clocks or random numbers.
"""
