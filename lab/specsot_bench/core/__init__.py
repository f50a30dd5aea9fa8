"""The pure parts of the bench: methods, tables, paired runs, reports, inputs of in-memory EAGLE."""
