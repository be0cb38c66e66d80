"""Loads a run for the server: its weights, engine and sessions, or the encoder and gallery of a prior."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError, invalid
from linnet.data.embeddings.load import open_neighbor_index
from linnet.data.embeddings.neighbors import NeighborIndex
from linnet.data.embeddings.provenance import find_encoder
from linnet.data.encoders import Encoder, open_encoder
from linnet.runs.load import LoadedRun, decoding_mesh, open_run
from linnet.serve.chat_template import Template
from linnet.serve.engine import EngineConfig
from linnet.serve.prior.served import MAX_GALLERY, ServedPrior, serve_prior
from linnet.serve.served import ServedModel, serve_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How the models of a server are loaded. The flags of `linnet serve` document them."""

    checkpoint: str = "best"
    weights: WeightDtype = "float32"
    mesh: str = ""
    n_slots: int = 8
    max_waiting: int = 64
    prefix_bytes: int = 512 << 20
    session_bytes: int = 4096 << 20
    session_folder: Path | None = None


def load_model(
    name: str, folder: Path, template: Template, settings: ServeSettings, log: Callable[[str], None]
) -> ServedModel | ServedPrior:
    """Load a run, compile its programs and start its engine. `log` receives a line about it, and what it cannot do."""
    run = open_run(folder, settings.checkpoint, settings.weights, decoding_mesh(folder, settings.mesh))
    if not run.cfg.reads_tokens:
        return _load_prior(name, run, settings, log)
    return _load_tokens(name, run, template, settings, log)


def _load_tokens(
    name: str, run: LoadedRun, template: Template, settings: ServeSettings, log: Callable[[str], None]
) -> ServedModel:
    model = serve_model(
        name,
        run.lm,
        run.cfg.model,
        run.params,
        run.buffers,
        run.vocabulary.tokenizer,
        run.vocabulary.shape,
        EngineConfig(n_slots=settings.n_slots, max_waiting=settings.max_waiting, prefix_bytes=settings.prefix_bytes),
        template,
        settings.session_bytes,
        settings.session_folder,
    )
    length = "at any length" if model.context is None else f"up to {model.context} tokens"
    log(f"{name}: {settings.n_slots} slots, {model.state_bytes / 1e6:.1f} MB per user, {length}.")
    return model


def _load_prior(name: str, run: LoadedRun, settings: ServeSettings, log: Callable[[str], None]) -> ServedPrior:
    if settings.weights == "int8":
        raise invalid("--weights", settings.weights, "float32 or bfloat16 for a prior", "omit it")
    encoder, no_encoder = _encoder(run)
    gallery, no_gallery = _gallery(run)
    model = serve_prior(
        name,
        run.cfg.prior,
        run.params,
        encoder=encoder,
        gallery=gallery,
        n_slots=settings.n_slots,
        max_waiting=settings.max_waiting,
    )
    log(f"{name}: {settings.n_slots} slots, embeddings of width {model.width}.")
    for missing in (no_encoder, no_gallery):
        if missing:
            log(f"{name}: {missing}")
    return model


def _encoder(run: LoadedRun) -> tuple[Encoder | None, str | None]:
    """Return the encoder of the run's training data, or None and the reason."""
    name = find_encoder(run.cfg.pairs, run.folder)
    if name is None:
        return None, "the encoder of its data is unknown: requests must give embeddings, not texts."
    try:
        encoder = open_encoder(name)
        if run.cfg.prior.text_encodings and not encoder.text_len:
            encoder.encode_texts([""])  # raises the reason
        return encoder, None
    except UserError as error:
        return None, f"requests must give embeddings, not texts: {error}"


def _gallery(run: LoadedRun) -> tuple[NeighborIndex | None, str | None]:
    """Return the index of the run's images, or None and the reason: a run is served even if its data is gone."""
    try:
        gallery = open_neighbor_index(run.cfg.pairs, run.cfg.seed, run.cfg.prior.dim)
    except UserError as error:
        return None, f"no gallery: {error}"
    if gallery.n_rows > MAX_GALLERY:
        return None, f"no gallery: its data has {gallery.n_rows:,} images, more than {MAX_GALLERY:,}."
    return gallery, None
