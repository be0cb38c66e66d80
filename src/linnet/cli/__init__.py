"""The `linnet` command. Each subcommand parses its flags, calls one function of the layers below, and prints."""

from __future__ import annotations

from linnet.cli.interruption import exit_now, install


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Ctrl-C is handled from the start, because imports take seconds."""
    install()
    try:
        from linnet.cli.dispatch import main as run
    except KeyboardInterrupt:
        exit_now()
    return run(arguments)
