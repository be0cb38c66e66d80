"""Verification of the `moe` family: files of the Grok-1 release."""
