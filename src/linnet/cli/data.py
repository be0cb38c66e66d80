"""`linnet data prepare | embed | show | check`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from linnet.cli.flags import Layout
from linnet.cli.parse import parse
from linnet.core.errors import UserError, did_you_mean, invalid
from linnet.core.files import atomic_write

if TYPE_CHECKING:
    from linnet.data.index import Index
    from linnet.data.prepare.pipeline import PrepareConfig
    from linnet.data.sources.documents import Documents
    from linnet.data.sources.images import ImageSource

SUBCOMMANDS = """usage: linnet data COMMAND [--help] ...

  prepare  tokenize text or images into memory-mapped shards
  embed    compute embedding pairs of images and captions, for a prior
  show     show a training batch as text or images
  check    verify the checksums and counts of prepared data"""


def data_command(argv: list[str]) -> int:
    from linnet.cli.data_embed import embed_command

    commands = {"prepare": _prepare, "embed": embed_command, "show": _show, "check": _check}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    is_help = bool(argv) and argv[0] in ("-h", "--help")
    print(SUBCOMMANDS, file=sys.stdout if is_help else sys.stderr)
    if not is_help and argv:
        raise UserError(f"there is no command 'data {argv[0]}'.{did_you_mean(argv[0], commands)}")
    return 0 if is_help else 2


@dataclasses.dataclass(frozen=True)
class PrepareFlags:
    layout: ClassVar[Layout] = {
        "": ("out", "tokenizer", "validation-fraction", "test-fraction", "workers", "json"),
        "source": ("column", "from", "end-token", "max-unpacked-gb"),
        "image": ("size", "max-broken"),
    }
    source: Annotated[str, tyro.conf.Positional]
    """A text file, folder or glob; .gz, .bz2, .xz, .zst or .zip files; .jsonl or .parquet; hf:OWNER/NAME (a dataset of the
    Hugging Face hub); a folder, zip, tar or parquet of images; or one of enwik8, pg19, imagenet64."""
    out: Path
    """Output folder."""
    tokenizer: str = "bytes"
    """`bytes`, a sentencepiece .model, a tokenizer.json, or a folder (prepared data or a run) with a tokenizer."""
    end_token: str | None = None
    """Name of the EOS token, if the tokenizer does not define one. Default: that of the tokenizer."""
    column: str | None = None
    """JSONL, parquet and Hugging Face datasets: field with the text or image. Default: `text` or `image`."""
    size: int = 64
    """Height and width of the images in pixels."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Local file or folder of a named dataset (enwik8, pg19, imagenet64) that you already have. Default: download it."""
    validation_fraction: float = 0.05
    """Fraction of the documents held out for validation."""
    test_fraction: float = 0.05
    """Fraction of the documents held out for testing."""
    max_broken: float = 0.01
    """Maximum fraction of broken images. Broken images are skipped and counted."""
    workers: int | None = None
    """Number of worker processes. Default: the number of CPU cores."""
    max_unpacked_gb: float | None = None
    """Reject a source whose compressed files unpack to more gigabytes than this. Default: 100 times their packed size, at
    least 0.27."""
    json: bool = False
    """Print one JSON object instead of text."""


def _prepare(argv: list[str]) -> int:
    description = "Tokenize a source into shards that training memory-maps. Run the same command again to resume an interrupted run."
    flags = parse(PrepareFlags, argv, "data prepare", description)
    _check_flags(flags)
    from linnet.data.prepare.pipeline import prepare

    task = _task(flags)
    start = time.perf_counter()
    with _bar("preparing", task.source.n_bytes, quiet=flags.json) as progress:
        index = prepare(task, flags.out, workers=flags.workers, progress=progress)
    seconds = time.perf_counter() - start
    unpacked = getattr(task.source, "unpacked_bytes", 0)  # 0: nothing was compressed, or everything was already done
    if flags.json:
        description = {"out": str(flags.out), "seconds": seconds, "unpacked_bytes": unpacked}
        print(json.dumps({**description, **_summary(index)}))
        return 0
    _print_summary(index, flags.out, seconds)
    if unpacked:
        print(f"Unpacked {unpacked:,} bytes from a source of {task.source.n_bytes or 0:,}.")
    return 0


def _check_flags(flags: PrepareFlags) -> None:
    for name in ("validation_fraction", "test_fraction", "max_broken"):
        if not 0 <= getattr(flags, name) <= 1:
            raise invalid(f"--{name.replace('_', '-')}", getattr(flags, name), "between 0 and 1", "use 0.05")
    if flags.validation_fraction + flags.test_fraction >= 1:
        raise invalid(
            "--validation-fraction + --test-fraction",
            flags.validation_fraction + flags.test_fraction,
            "below 1, so that something is left to train on",
            "use 0.05 and 0.05",
        )
    if flags.size < 1:
        raise invalid("--size", flags.size, "at least 1", "use 64")
    if flags.workers is not None and flags.workers < 1:
        raise invalid("--workers", flags.workers, "at least 1", "leave it out")


def _task(flags: PrepareFlags) -> PrepareConfig:
    from linnet.data.prepare.chunks import SplitFractions
    from linnet.data.prepare.pipeline import PrepareConfig
    from linnet.tokenizers.load import open_tokenizer

    source, pixels = _open(flags)
    if pixels and flags.tokenizer != "bytes":
        raise invalid("--tokenizer", flags.tokenizer, "bytes: images are read value by value", "leave it out")
    return PrepareConfig(
        source=source,
        tokenizer=open_tokenizer(flags.tokenizer, end_token=flags.end_token),
        fractions=SplitFractions(validation=flags.validation_fraction, test=flags.test_fraction),
        size=flags.size if pixels else None,
        max_broken=flags.max_broken,
    )


def _open(flags: PrepareFlags) -> tuple[Documents | ImageSource, bool]:
    from linnet.core.files import cache_folder
    from linnet.data import index as indexes
    from linnet.data.prepare.pipeline import is_unfinished
    from linnet.data.sources.catalog import BENCHMARKS, open_benchmark
    from linnet.data.sources.documents import open_documents
    from linnet.data.sources.images import contains_images, open_images

    path = Path(os.path.expanduser(flags.source))
    if flags.source in BENCHMARKS:  # a folder of that name can be given as ./NAME
        # The size of a download is not known before it begins.
        with _bar("fetching", None, quiet=flags.json) as fetched:
            found = open_benchmark(flags.source, flags.from_, cache_folder(), lambda done, _: fetched(done))
        return found, BENCHMARKS[flags.source].kind == "images"
    if flags.from_ is not None:
        raise invalid(
            "--from",
            str(flags.from_),
            f"a named dataset as SOURCE ({', '.join(BENCHMARKS)})",
            "give the path as SOURCE",
        )
    if indexes.is_prepared(path) or is_unfinished(path):
        raise invalid("SOURCE", flags.source, "a source that is not prepared data", "train on it with --data.source")
    if contains_images(flags.source):
        return open_images(flags.source, column=flags.column, max_unpacked_gb=flags.max_unpacked_gb), True
    return open_documents(flags.source, column=flags.column, max_unpacked_gb=flags.max_unpacked_gb), False


@contextmanager
def _bar(label: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes if stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda position: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda position: bar.update(task, completed=position)


def _summary(index: Index) -> dict[str, Any]:
    return {
        "kind": index.kind,
        "shape": index.shape,
        "dtype": index.dtype,
        "tokenizer": index.tokenizer,
        "shards": len(index.shards),
        "splits": {
            name: {"documents": s.n_documents, "tokens": s.tokens, "bytes": s.bytes, "words": s.words}
            for name, s in index.splits.items()
        },
        "held_out": index.held_out,
        "left_out": index.left_out,
        "lossy_documents": index.lossy_documents,
    }


def _print_summary(index: Index, out: Path, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    what = "images" if index.kind == "pixels" else "documents"
    table = Table("split", what, "tokens", "bytes", "words", box=None)
    for name, split in index.splits.items():
        words = "" if split.words is None else f"{split.words:,}"
        table.add_row(name, f"{split.n_documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", words)
    console = Console()
    console.print(table)
    if index.left_out:
        reasons = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in sorted(index.left_out.items()))
        console.print(f"Skipped: {reasons}.")
    if index.lossy_documents:
        console.print(
            f"{index.lossy_documents:,} parts of documents do not round-trip byte for byte: this tokenizer is not byte-exact."
        )
    n_bytes = sum(split.bytes for split in index.splits.values())
    console.print(
        f"Held out: {index.held_out}. {n_bytes / 1e6:,.1f} MB in {seconds:.1f} s, {len(index.shards)} shards in {out}."
    )
    length = math.prod(index.shape) if index.shape else None
    size = f" --data.sequence-len {length} --data.update-len {length}" if length else ""
    vocabulary = index.tokenizer["n_vocab"]
    ids = (
        ""
        if index.tokenizer["kind"] == "bytes"
        else f" --model.n-vocab {vocabulary} --model.end-id {index.tokenizer['end_id']}"
    )
    console.print(f"Train on it: linnet train quickstart --data.source {out}{size}{ids} --out RUN", soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class ShowFlags:
    what: Annotated[Path, tyro.conf.Positional]
    """Prepared data, or a run folder."""
    step: int = 0
    """Training step."""
    batch_size: int | None = None
    """Number of sequences. Default: that of the run, or 4."""
    sequence_len: int | None = None
    """Sequence length in tokens. Default: that of the run, one image, or 512."""
    seed: int | None = None
    """Seed of the data order. Default: that of the run, or 0."""
    out: Path = Path("step.png")
    """Images: output file of the contact sheet."""
    json: bool = False
    """Print token ids, document ids and the loss mask as one JSON object."""


def _show(argv: list[str]) -> int:
    flags = parse(
        ShowFlags, argv, "data show", "Show a training batch as text or images, with the boundaries of documents."
    )
    if flags.step < 0:
        raise invalid("--step", flags.step, "0 or more", "use 0")
    import numpy as np

    from linnet.data import load_dataset
    from linnet.data.batch import format_rows
    from linnet.data.images import contact_sheet, ids_to_pixels

    cfg, seed = _data_of(flags)
    data = load_dataset(cfg, seed if flags.seed is None else flags.seed)
    batch = data.batch(flags.step)
    if flags.json:
        names = ("inputs", "targets", "doc_ids", "loss_mask")
        print(json.dumps({"step": flags.step, **{name: getattr(batch, name).tolist() for name in names}}))
        return 0
    if data.shape is not None and cfg.update_len == cfg.sequence_len:
        images, _ = ids_to_pixels(np.asarray(batch.targets), (len(batch.targets), *data.shape))
        atomic_write(flags.out, contact_sheet(images, 8, max(1, 64 // data.shape[1])))
        print(f"The {len(images)} images of step {flags.step} are in {flags.out}.")
        return 0
    for row, text in enumerate(format_rows(batch, data.tokenizer)):
        print(f"--- step {flags.step}, row {row} ---\n{text}")
    return 0


def _data_of(flags: ShowFlags) -> tuple[Any, int]:
    from linnet.config import codec
    from linnet.config.schema import DataConfig
    from linnet.data import index as indexes

    if (flags.what / "config.json").is_file():
        run = codec.load(flags.what / "config.json")
        cfg, seed = run.data, run.seed
    elif indexes.is_prepared(flags.what):
        shape = indexes.load(flags.what).shape
        length = math.prod(shape) if shape else 512
        cfg, seed = DataConfig(source=str(flags.what), sequence_len=length, update_len=length, batch_size=4), 0
    else:
        raise invalid("DIR|RUN", str(flags.what), "prepared data or a run", "prepare data with `linnet data prepare`")
    length = flags.sequence_len
    changes: dict[str, Any] = {} if length is None else {"sequence_len": length, "update_len": length}
    changes |= {} if flags.batch_size is None else {"batch_size": flags.batch_size}
    return dataclasses.replace(cfg, **changes), seed


@dataclasses.dataclass(frozen=True)
class CheckFlags:
    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of prepared data."""
    json: bool = False
    """Print one JSON object instead of text."""


def _check(argv: list[str]) -> int:
    flags = parse(
        CheckFlags,
        argv,
        "data check",
        "Verify the checksums and counts of prepared data. Exits with code 1 if something is wrong.",
    )
    from linnet.data import index as indexes

    if not indexes.is_prepared(flags.folder):
        raise invalid("DIR", str(flags.folder), "prepared data", "prepare it with `linnet data prepare`")
    index = indexes.load(flags.folder)
    problems = indexes.find_problems(flags.folder, index, checksums=True)
    try:
        indexes.load_tokenizer(flags.folder, index)
    except UserError as error:
        problems.append(str(error))
    if flags.json:
        print(json.dumps({"folder": str(flags.folder), "ok": not problems, "problems": problems}))
    else:
        for problem in problems:
            print(problem)
        n_tokens = sum(shard.tokens for shard in index.shards)
        print(f"{flags.folder}: {'damaged' if problems else 'good'}, {len(index.shards)} shards, {n_tokens:,} tokens.")
    return 1 if problems else 0
