"""Complete a run config made from DALLE2-pytorch settings: find its pairs, and compute the number of updates."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from linnet.config.schema import EMOJI_PAIRS, PairsConfig, RunConfig
from linnet.convert.dalle2.config import count_updates, optim_config, remarks, run_config
from linnet.convert.dalle2.schema import Clip, DallE2Config
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import is_remote
from linnet.data.embeddings import open_pairs
from linnet.data.embeddings.sources import FOLDERS

PLACEHOLDER = re.compile(r"\s*(<.*>)?\s*")
PATH_FIELDS = ("images", "texts", "metadata", "encodings")
FLAGS = {
    "data.image_url": "--data.images PATH --data.metadata PATH",
    "data.text_url": "--data.texts PATH",
    "data.meta_url": "--data.metadata PATH",
}
OPENAI = {
    "ViT-L/14": "ViT-L-14",
    "ViT-B/32": "ViT-B-32",
    "ViT-B/16": "ViT-B-16",
    "ViT-L/14@336px": "ViT-L-14-336",
    "RN50": "RN50",
    "RN101": "RN101",
}
"""The reference's names of OpenAI's models, and open_clip's."""


def complete_config(parts: DallE2Config, requested: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the requested run with its paths resolved and its length set, and remarks for the user.

    `requested` is `run_config(parts)` changed by flags. Nothing is written.
    """
    base, messages = run_config(parts), list(remarks(parts))
    data, found = _resolve_paths(parts, requested.pairs, base.pairs)
    pairs = open_pairs(data, requested.seed, encodings=requested.prior.text_encodings)
    if requested.prior.text_encodings and pairs.text_len is None:
        raise invalid(
            "prior.condition_on_text_encodings",
            True,
            f"false if the data has no token encodings of its texts ({FOLDERS['encodings']}/ beside the embeddings)",
            "make the pairs with `linnet data embed`, which writes them, or add --model.no-text-encodings --model.max-text-len 0 to "
            "train on the embeddings alone",
        )
    messages += found
    optim = requested.optim
    if (optim.steps, optim.extra_steps) == (base.optim.steps, base.optim.extra_steps):
        steps, words = _training_steps(
            parts, {name: pairs.n_rows(name) for name in ("train", "validation", "test")}, data
        )
        messages += words
        made = optim_config(parts.train, steps)
        optim = dataclasses.replace(optim, steps=made.steps, extra_steps=made.extra_steps)
        if optim.warmup_steps > steps:
            messages.append(
                f"train.warmup_steps is {optim.warmup_steps:,}, more than the {steps:,} updates that the pairs give: the learning "
                "rate does not reach train.lr, as in the reference."
            )
    return dataclasses.replace(requested, data=data, optim=optim), messages


def _training_steps(parts: DallE2Config, rows: dict[str, int], data: PairsConfig) -> tuple[int, list[str]]:
    """Return the number of updates, by `num_data_points` or all existing pairs, and remarks."""
    total, wanted = sum(rows.values()), parts.data.num_data_points
    if wanted is None or wanted == total:
        return _ceil_batches(parts.train.epochs * rows["train"], data), []
    if wanted > total:
        words = f"data.num_data_points is {wanted:,}, but there are {total:,} pairs: an epoch is all of them."
        return _ceil_batches(parts.train.epochs * rows["train"], data), [words]
    words = (
        f"data.num_data_points is {wanted:,} of {total:,} pairs: training has as many updates as with that number, but "
        "draws from all pairs. To leave some out, name fewer files with --data.images."
    )
    return count_updates(parts, wanted, data.batch_size), [words]


def _ceil_batches(n_pairs: int, data: PairsConfig) -> int:
    return max(1, -(-n_pairs // data.batch_size))


def _resolve_paths(parts: DallE2Config, requested: PairsConfig, base: PairsConfig) -> tuple[PairsConfig, list[str]]:
    """Return the data config with paths that can be opened. A flag that names a source overrides all paths of the file."""
    if requested.source != base.source or (requested.images is None and base.images is not None):
        words = []
        kept = {name: None for name in PATH_FIELDS if getattr(requested, name) == getattr(base, name)}
        requested = dataclasses.replace(requested, **kept)
        if requested.source == EMOJI_PAIRS:
            defaults = PairsConfig()
            shares = {name: getattr(defaults, name) for name in ("validation_fraction", "test_fraction")}
            requested = dataclasses.replace(requested, **shares)
            words = [f"data.splits is ignored: {EMOJI_PAIRS} is split by what its images show."]
        return requested, words
    assert requested.images is not None
    _check_is_local("data.image_url", requested.images)
    # If a flag names the images, other paths of the file are dropped if they are placeholders or remote.
    left = [
        name for name in ("texts", "metadata") if requested.images != base.images and _is_unusable(getattr(base, name))
    ]
    left = [name for name in left if getattr(requested, name) == getattr(base, name)]
    requested = dataclasses.replace(requested, **dict.fromkeys(left))
    for field, value in (("data.text_url", requested.texts), ("data.meta_url", requested.metadata)):
        if value is not None:
            _check_is_local(field, value)
    root = _find_layout(requested)
    if root is not None:
        words = [f"Text embeddings (and captions, if any) are read from beside the image embeddings, in {root}."]
        return dataclasses.replace(requested, source=str(root), images=None, metadata=None), words
    if requested.texts is None:
        raise _captions_only(requested, parts.prior.clip)
    remark = f"data.meta_url ({base.metadata}) is not a local path, so no captions can be shown. To show them: --data.metadata PATH."
    return requested, [remark] if "metadata" in left else []


def _find_layout(data: PairsConfig) -> Path | None:
    """Return the folder with both embeddings (and captions), in the layout of clip-retrieval and `linnet data embed`."""
    assert data.images is not None
    images = Path(data.images).expanduser()
    root = images.parent
    if data.texts is not None or images.name != FOLDERS["image"] or not (root / FOLDERS["text"]).is_dir():
        return None
    captions = root / FOLDERS["metadata"]
    if data.metadata is not None and Path(data.metadata).expanduser().resolve() != captions.resolve():
        raise invalid(
            "data.meta_url",
            data.metadata,
            f"{captions}, which is beside the text embeddings",
            f"use it, or name all three: --data.images {images} --data.texts {root / FOLDERS['text']} --data.metadata PATH",
        )
    return root


def _is_unusable(value: str | None) -> bool:
    return value is not None and bool(PLACEHOLDER.fullmatch(value) or is_remote(value))


def _check_is_local(field: str, value: str) -> None:
    if PLACEHOLDER.fullmatch(value):
        raise invalid(field, value, "a path: this is a placeholder", f"edit the file, or add {FLAGS[field]}")
    if is_remote(value):
        needs = "a path on this machine: training reads at random and does not open URLs"
        raise invalid(field, value, needs, f"download it, and add {FLAGS[field]}")


def _captions_only(data: PairsConfig, clip: Clip | None) -> UserError:
    """Return the error for captions without embeddings: the reference embeds them while training; here it is done once, beforehand."""
    make, model = ("openai", "ViT-L/14") if clip is None else (clip.make, clip.model)
    known = make == "openai" and model in OPENAI
    encoder = f"open_clip:{OPENAI[model]}/openai" if known else "open_clip:MODEL/WEIGHTS"
    command = f"linnet data embed {data.images} --metadata {data.metadata or 'PARQUET'} --encoder {encoder} --out DIR"
    own = (
        ""
        if known
        else f" (with {make}'s own model: write its text embeddings as .npy and name them with --data.texts)"
    )
    return UserError(
        f"data.image_url ({data.images}) has image embeddings, but text embeddings are needed too: captions are embedded once, before "
        f"training. Fix: name them with --data.texts PATH, or make them with `{command}`{own} and add --data.source DIR."
    )
