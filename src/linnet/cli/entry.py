"""The entry point of the command line: handles Ctrl-C while the program starts."""

from __future__ import annotations

from linnet.cli.interruption import exit_now, install


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the command line."""
    install()
    try:
        from linnet.cli.dispatch import main as run
    except KeyboardInterrupt:
        exit_now()
    return run(arguments)
