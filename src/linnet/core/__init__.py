"""Foundations: errors, pytrees, parameters, dtypes, random keys, files."""
