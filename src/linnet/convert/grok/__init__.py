"""Grok-1 from what was released or converted: its files, their names and sizes, and the way to a run and back."""
