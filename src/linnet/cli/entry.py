"""Entry point of the command line, which handles Ctrl-C during startup."""

from __future__ import annotations

from linnet.cli.interruption import exit_now, install


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    install()
    try:
        from linnet.cli.dispatch import main as run
    except KeyboardInterrupt:
        exit_now()
    return run(arguments)
