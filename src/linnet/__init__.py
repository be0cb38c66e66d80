"""Linnet."""
