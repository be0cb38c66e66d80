"""Text-to-image generation: an encoder embeds the text, a prior samples an image embedding, and a painter generates the image.

Letters: n images, E width of an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, UInt8

from linnet.config.schema import RunConfig
from linnet.core import rng
from linnet.core.errors import UserError, invalid
from linnet.data.conditioning import BUILTIN
from linnet.data.embeddings import open_pairs
from linnet.data.embeddings.neighbors import NeighborIndex, unit
from linnet.data.embeddings.provenance import encoder_of
from linnet.data.encoders.encoder import Encoder, encode_prompt
from linnet.data.encoders.load import open_encoder
from linnet.generate.samples import sample_pictures
from linnet.models.prior import sampling
from linnet.models.prior.conditions import cut_encodings
from linnet.models.prior.solver import default_steps, make_solver
from linnet.nn.sampling import SamplingSettings
from linnet.runs.folder import RunFolder
from linnet.runs.load import Run, open_run

AT_ONCE = 16
"""Images generated per batch, which bounds memory for any number of images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imagination:
    prior: Run
    painter: Run
    encoder: Encoder
    shape: tuple[int, int, int]

    def embeds(
        self, text: str, seeds: Sequence[int], *, steps: int | None = None, guidance: float = 1.0
    ) -> Float32[np.ndarray, "n E"]:
        """Sample one unit-norm image embedding per seed. The server returns the same embeddings for the same seeds."""
        cfg = self.prior.cfg.prior
        plan = make_solver(cfg, default_steps(cfg, "ddim") if steps is None else steps)
        embed, encodings = encode_prompt(self.encoder, text, with_encodings=cfg.text_encodings)
        if len(embed) != cfg.d_text:
            needs = f"{cfg.d_text}, the width of the prior's texts"
            raise invalid(f"the width of the encoder {self.encoder.name}", len(embed), needs, "use another prior")
        encodings = cut_encodings(encodings, cfg)
        keys = jnp.stack([rng.sample_key(seed) for seed in seeds])
        params = sampling.prepared(self.prior.params, cfg)
        texts = jnp.repeat(jnp.asarray(embed)[None], len(seeds), axis=0)
        tokens = None if encodings is None else jnp.repeat(jnp.asarray(encodings)[None], len(seeds), axis=0)
        return unit(np.asarray(sampling.sample(params, texts, tokens, plan, keys, cfg, guidance=guidance)))

    def paint(
        self,
        embeds: Float32[np.ndarray, "n E"],
        settings: SamplingSettings,
        seeds: Sequence[int],
        *,
        guidance: float = 1.0,
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Generate one image per embedding. `settings` has one row, which is used for all images."""
        run, painted = self.painter, []
        if guidance != 1.0 and not run.cfg.vq.p_drop_condition:
            needs = "1: this painter never trained without its embedding (model.p_drop_condition is 0)"
            raise invalid("guidance", guidance, needs, "use 1, or train it with 0.1")
        for at in range(0, len(embeds), AT_ONCE):
            part = embeds[at : at + AT_ONCE]
            row = np.zeros(len(part), np.int32)
            painted.append(
                sample_pictures(
                    run.writer,
                    run.cfg,
                    run.params,
                    run.buffers,
                    self.shape,
                    [b""] * len(part),
                    jax.tree.map(lambda x, row=row: x[row], settings),
                    seeds[at : at + AT_ONCE],
                    part,
                    guidance,
                )
            )
        return np.concatenate(painted)

    def nearest(self, embeds: Float32[np.ndarray, "n E"], k: int) -> list[list[tuple[str, float]]] | None:
        """Return captions and cosines of the nearest images in the prior's training data.

        None if the data is not available or has no captions.
        """
        try:
            found = NeighborIndex(open_pairs(self.prior.cfg.pairs, self.prior.cfg.seed)).nearest(embeds, k)
        except UserError:
            return None
        if found.captions is None:
            return None
        return [
            list(zip(captions, cosines.tolist(), strict=True))
            for captions, cosines in zip(found.captions, found.cosines, strict=True)
        ]


def open_imagination(prior: Path, painter: Path, checkpoint: str = "best") -> Imagination:
    """Load the prior and the painter. Raises if they cannot be used together."""
    for flag, path in (("--prior", prior), ("--painter", painter)):
        if not RunFolder(path).config.exists():
            raise UserError(
                f"{flag} is {path}, where no run is. Fix: make both with `linnet train prior-emoji` and `linnet train "
                f"emoji-imagine`, or name yours with --prior and --painter."
            )
    first = open_run(prior, checkpoint)
    if first.cfg.family != "prior":
        raise invalid("--prior", f"{prior}, a run of the family {first.cfg.family}", "a run of the family prior", _MAKE)
    second = open_run(painter, checkpoint)
    encoder = _encoder_of_both(first.cfg, second.cfg, prior, painter)
    shape = second.vocabulary.shape
    if shape is None:
        raise invalid("--painter", f"{painter}, which writes text", "a run that paints pictures", _MAKE_PAINTER)
    return Imagination(prior=first, painter=second, encoder=open_encoder(encoder), shape=shape)


_MAKE = "`linnet train prior-emoji` makes one"
_MAKE_PAINTER = "`linnet train emoji-imagine` makes one"


def _encoder_of_both(first: RunConfig, second: RunConfig, prior: Path, painter: Path) -> str:
    if not second.d_condition:
        needs = "a vq run with model.d_condition: one that can be told what to paint"
        raise invalid("--painter", f"{painter}, which nothing conditions", needs, _MAKE_PAINTER)
    if first.prior.dim != second.d_condition:
        needs = f"{first.prior.dim}, the width of the embeddings of {prior}"
        raise invalid(f"model.d_condition of {painter}", second.d_condition, needs, "train it on those embeddings")
    name = encoder_of(first.pairs, prior)
    if name is None:
        needs = "pairs whose encoder is known, so that it can read your text"
        raise invalid("--prior", f"{prior}, of {first.pairs.source}", needs, "make pairs with `linnet data embed`")
    if second.tokens.condition == BUILTIN and name != BUILTIN:
        needs = f"embeddings by {name}, as those of {prior}"
        raise invalid(f"data.condition of {painter}", BUILTIN, needs, "train it on an .npy of such embeddings")
    return name
