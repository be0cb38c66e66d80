"""Samples written during training (being wired)."""


def write_sample(*a): ...
