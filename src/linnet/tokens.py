"""The ids that mean the same in every vocabulary of bytes and pixels: three special ones, then the 256 values of a byte."""

from __future__ import annotations

PAD, END, UNKNOWN = 0, 1, 2
FIRST_BYTE = 3
"""Byte b is id b + 3."""
N_BYTE_IDS = FIRST_BYTE + 256
