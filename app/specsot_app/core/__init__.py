"""Pure parts of the app: requests, presets, devices and layer ranges, what screens and reports show.

Refuses to know loops, networks, tensors, clocks and dice."""
