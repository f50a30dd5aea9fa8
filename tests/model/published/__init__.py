"""Tiny checkpoints that the libraries of their formats wrote; `making` wrote them."""

from pathlib import Path

HERE = Path(__file__).parent
