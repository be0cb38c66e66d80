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
    "quickstart": (
        "quickstart",
        "train a small model on this Python's own source, evaluate it, and read what it writes",
    ),
    "train": ("train", "train a preset (or a config.json), or go on with a run"),
    "eval": (
        "evaluate",
        "bits per byte, perplexity and loss by position (of a prior: losses, cosines, retrieval) on any split",
    ),
    "sample": ("sample", "write text, paint pictures or predict embeddings with a run"),
    "imagine": ("imagine", "paint pictures of a text with a prior and a painter"),
    "serve": ("serve", "serve runs over HTTP as OpenAI does, with sessions and a playground"),
    "data": ("data", "prepare data for training, look at it, check it"),
    "tokenizer": ("tokenizer", "train a tokenizer, or see what one makes of a text"),
    "bench": ("bench", "measure speed, compile time and memory"),
    "verify": ("verify", "check this implementation against reference files"),
    "report": ("report", "one self-contained HTML page about a run"),
    "import": ("interchange", "make a run of weights from elsewhere"),
    "export": ("interchange", "write a run's weights for elsewhere"),
    "presets": ("presets", "list the presets"),
    "plan": ("plan", "bytes, FLOPs and communication of a run on devices that are not here"),
    "launch": ("launch", "run a command in several processes of this machine, as one cluster"),
}

EXIT_CODES = """Exit codes: 0 done; 1 a check failed (verify, data check); 2 something asked for cannot be done; 3 the loss stayed not
finite; 4 the port is in use (serve); 75 interrupted and saved: run the same command again to resume; 76 another process of the
cluster was lost: start them all again to resume from the last checkpoint; 128 + n ended at once by signal n (130: Ctrl-C)."""


def main(arguments: list[str] | None = None) -> None:
    argv = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        sys.exit(EXIT_OK if argv else EXIT_USER)
    if argv[0] == "--version":
        from linnet import __version__

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
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {words}" for name, (_, words) in COMMANDS.items()]
    return "\n".join(
        [
            "Linnet: sequence models whose cost per token does not grow with what they have read.",
            "",
            "usage: linnet COMMAND [--help] ...",
            "",
            *lines,
            "",
            EXIT_CODES,
        ]
    )
