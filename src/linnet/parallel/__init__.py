"""Meshes, sharding and the processes of one run."""
