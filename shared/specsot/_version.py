"""The version of this distribution, where every room may read it without importing the package's top."""

__version__ = "0.1.0"
