"""The lab: measurements, quality, training. Imports the product; nothing of the product imports it."""
