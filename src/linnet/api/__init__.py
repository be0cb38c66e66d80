"""The public Python API. `import linnet` re-exports its names; the commands are built on it."""
