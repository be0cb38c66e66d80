"""Linnet: linear-time networks, trained and served exactly."""

__version__ = "0.1.0"
