"""Command dispatch: run the subcommand, and turn errors into a message and an exit code."""

from __future__ import annotations

import errno
import importlib
import logging
import sys
import traceback

from linnet.cli.interruption import EXIT_INTERRUPT
from linnet.core.errors import UserError, did_you_mean
from linnet.parallel import cluster

EXIT_OK, EXIT_FAILED, EXIT_USER, EXIT_NOT_FINITE = 0, 1, 2, 3
DISK_ERRORS = {
    errno.ENOSPC: "free some room there, or choose another folder",
    errno.EDQUOT: "free some room there, or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose another folder, or correct its permissions",
    errno.EPERM: "choose another folder, or correct its permissions",
    errno.EIO: "check the disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""System errors that can occur in any command, and their fixes."""

# command -> (module with a function NAME_command, description)
COMMANDS = {
    "quickstart": ("quickstart", "train, evaluate and sample a small model in minutes"),
    "train": ("train", "train a model from a preset, fine-tune one, or resume a run"),
    "eval": ("evaluate", "evaluate a run on a split or on other data"),
    "sample": ("sample", "generate text, images or image embeddings"),
    "imagine": ("imagine", "generate images from a text, with a prior and an image model"),
    "serve": ("serve", "serve runs over an OpenAI-compatible HTTP API"),
    "data": ("data", "prepare, embed, show and check training data"),
    "tokenizer": ("tokenizer", "train a tokenizer, or show the tokens of a text"),
    "bench": ("bench", "measure speed, compile time and memory"),
    "verify": ("verify", "compare this implementation with the references"),
    "report": ("report", "write a self-contained HTML report of a run"),
    "import": ("convert", "convert a checkpoint of another program into a run"),
    "export": ("convert", "write a run's weights for other programs"),
    "presets": ("presets", "list the presets"),
    "plan": ("plan", "estimate memory and speed on hardware you do not have"),
    "launch": ("launch", "run a command in several local processes, as one cluster"),
}

EXIT_CODES = {
    "0": "success",
    "1": "a check failed (verify, data check)",
    "2": "invalid request: the message names the cause and the fix",
    "3": "the loss remained NaN or infinite",
    "4": "the port is in use (serve)",
    "75": "interrupted, and saved: run the same command again to resume",
    "76": "a process of the cluster was lost: start all again to resume",
    "128+n": "terminated by signal n (130: Ctrl-C)",
}


def main(arguments: list[str] | None = None) -> None:
    argv = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        sys.exit(EXIT_OK if argv else EXIT_USER)
    if argv[0] == "--version":
        from linnet.core.version import __version__

        print(f"linnet {__version__}")
        return
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"linnet: there is no command {name!r}.{did_you_mean(name, COMMANDS)}\n\n{_overview()}", file=sys.stderr)
        sys.exit(EXIT_USER)
    failed: Exception | None = None
    try:
        module = importlib.import_module(f"linnet.cli.{COMMANDS[name][0]}")
        code = getattr(module, f"{name.replace('-', '_')}_command")(rest)
        sys.stdout.flush()  # reports a full disk here instead of at interpreter exit
    except UserError as error:
        failed = error
        print(f"linnet {name}: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", EXIT_USER)
    except BrokenPipeError:  # the reader of stdout exited, as `head` does
        sys.stderr.close()
        code = EXIT_OK
    except KeyboardInterrupt:
        code = EXIT_INTERRUPT
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        failed, code = error, EXIT_USER
        place = f"{error.filename} cannot be used" if error.filename else "a file cannot be written or read"
        print(f"linnet {name}: {place} ({error.strerror}). Fix: {DISK_ERRORS[error.errno]}.", file=sys.stderr)
    except Exception as error:
        if cluster.describe().count == 1:
            raise
        traceback.print_exc()
        failed, code = error, EXIT_FAILED
    cluster.shutdown(code or EXIT_OK, failed)
    sys.exit(code or EXIT_OK)


def _overview() -> str:
    def columns(rows: dict[str, str]) -> list[str]:
        width = max(map(len, rows))
        return [f"  {name:{width}}  {description}" for name, description in rows.items()]

    return "\n".join(
        [
            "Linnet: train and serve sequence models whose cost per token is constant.",
            "",
            "usage: linnet COMMAND [--help] ...",
            "",
            *columns({name: description for name, (_, description) in COMMANDS.items()}),
            "",
            "Exit codes:",
            *columns(EXIT_CODES),
        ]
    )
