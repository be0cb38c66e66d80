"""`linnet data embed`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from linnet.cli.parse import parse
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.data.embeddings.encodings import EncodingSettings
    from linnet.data.encoders import Encoder


@dataclasses.dataclass(frozen=True)
class EmbedFlags:
    source: Annotated[str, tyro.conf.Positional]
    """Images with captions: a folder with a .txt file next to each image, or with captions.json, .jsonl or .parquet; parquet
    files with both; webdataset tars; emoji-32. Or a folder with img_emb/ and metadata/, whose captions are embedded."""
    out: Path
    """Output folder."""
    encoder: str = "builtin"
    """`builtin`, or open_clip:MODEL/WEIGHTS (needs the extra `clip`)."""
    caption_key: str = "caption"
    """Parquet and JSON: field with the caption."""
    image_key: str | None = None
    """Parquet: column with the image. Default: `image`."""
    metadata: str | None = None
    """If SOURCE is image embeddings (.npy) without text embeddings: the parquet files with their captions. Default: none."""
    text_encodings: Literal["auto", "float16", "float32", "none"] = "auto"
    """Storage dtype of the captions' token encodings, which priors with model.text_encodings need, or none. `auto`: float16 if
    the encoder provides them. A caption takes positions x width x 2 bytes (118 KB with ViT-L/14)."""
    text_len: int | None = None
    """Number of token encoding positions to keep. Default: all positions of the encoder (77 with CLIP, 48 with builtin)."""
    shard_rows: int = 8192
    """Images per shard."""
    json: bool = False
    """Print one JSON object instead of text."""


def embed_command(argv: list[str]) -> int:
    description = (
        "Compute the embeddings of images and captions, on which a prior is trained, and the token encodings of the captions. Run the "
        "same command again to resume an interrupted run."
    )
    flags = parse(EmbedFlags, argv, "data embed", description)
    from linnet.data.embeddings.captioned_images import open_captioned
    from linnet.data.embeddings.embed import EmbedTask, embed
    from linnet.data.embeddings.embed_texts import embed_texts, find_image_embeds
    from linnet.data.embeddings.encodings import choose_encodings, encoding_bytes
    from linnet.data.encoders import open_encoder

    start = time.perf_counter()
    embedded = (
        (flags.source, flags.metadata) if flags.metadata else find_image_embeds(Path(os.path.expanduser(flags.source)))
    )

    def open_both() -> tuple[Encoder, EncodingSettings]:
        encoder = open_encoder(flags.encoder)
        return encoder, choose_encodings(encoder, flags.text_encodings, flags.text_len)

    with _counter(quiet=flags.json) as progress:
        if embedded:
            if flags.image_key is not None:
                raise invalid(
                    "--image-key",
                    flags.image_key,
                    "left out: the images of this source are already embedded",
                    "leave it out",
                )
            encoder, encodings = open_both()
            notes = embed_texts(*embedded, encoder, flags.out, flags.caption_key, encodings, progress)
        else:
            source = open_captioned(flags.source, flags.caption_key, flags.image_key)
            encoder, encodings = open_both()
            task = EmbedTask(source=source, encoder=encoder, encodings=encodings, shard_rows=flags.shard_rows)
            notes = embed(task, flags.out, progress)
    seconds = time.perf_counter() - start
    n_bytes = encoding_bytes(flags.out)
    if flags.json:
        summary = {
            "pairs": notes.n_pairs,
            "shards": notes.n_shards,
            "left_out": notes.left_out,
            "encoder": flags.encoder,
        }
        stored = {"dtype": encodings.dtype, "positions": encodings.length, "bytes": n_bytes}
        summary |= {"text_encodings": None if encodings.dtype == "none" else stored}
        print(json.dumps({"out": str(flags.out), "seconds": seconds, **summary}))
        return 0
    print(
        f"{notes.n_pairs:,} pairs in {notes.n_shards} shards in {flags.out}, embedded by {flags.encoder} in {seconds:.1f} s."
    )
    print(
        "No token encodings."
        if encodings.dtype == "none"
        else f"Token encodings: {encodings.length} positions of {encodings.dtype}, {n_bytes / 1e6:,.1f} MB."
    )
    if notes.left_out:
        print(
            "Skipped: " + ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in sorted(notes.left_out.items())) + "."
        )
    return 0


@contextmanager
def _counter(*, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a counter if stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console

    with Console(stderr=True).status("embedding") as status:
        yield lambda n: status.update(f"embedding: {n:,} images")
