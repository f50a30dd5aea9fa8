"""Quality and speed of planned answers against direct ones, category by category."""
