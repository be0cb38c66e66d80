"""Meshes, sharding and multi-process runs."""
