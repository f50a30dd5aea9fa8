"""The pure half of the tables: methods, samples, what they add up to, how they are written."""
