"""Verification of the `prior` family: files of DALLE2-pytorch."""
