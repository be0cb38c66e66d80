"""The `linnet` command. Each subcommand parses its flags, calls one function of the layers below, and prints."""

from linnet.cli.entry import main

__all__ = ["main"]
