"""Train the built-in encoder pair on the emoji's training split, and write its weights:

    python scripts/train_encoders.py [--teacher PAIRS.npz] [--steps N] [--out FILE]

The loss is contrastive: a caption and an image of the same emoji attract each other, all others repel. A teacher is a file with
stronger embeddings of the same emoji (`text_embed`, `image_embed`, `caption`, in one common space); only its rows of training captions
are used. Images are shifted, mirrored and partly covered; keywords and words are dropped at random, so that a bare name is encoded
well too.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet.core import params as weights
from linnet.core import rng
from linnet.data.embeddings.neighbors import recall
from linnet.data.encoders import builtin, network
from linnet.data.encoders.hashed_ngrams import KEYWORD, featurize
from linnet.data.sources.emoji import find_concept, open_emoji

BATCH = 128
MAX_WORDS = 1024
"""Maximum number of distinct words in a batch."""
TEMPERATURE = 0.05
EMA = 0.995


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.5)
    parser.add_argument(
        "--match", type=float, default=4.0, help="weight of the cosine loss to the teacher's own embeddings"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=builtin.WEIGHTS)
    args = parser.parse_args()
    images, captions, split = open_emoji(network.SIZE)
    train = np.flatnonzero(np.array(split) == "train")
    teacher = _teacher(args.teacher, captions) if args.teacher else None
    batches = _Batches(images[train], [captions[i] for i in train], teacher and [t[:, train] for t in teacher])

    schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 50, args.steps)
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=args.decay, mask=matrices)
    )
    params = weights.init(network.specs(), rng.root(args.seed))
    state, average = optimizer.init(params), params

    @jax.jit
    def step(params: Any, state: Any, average: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        loss, grads = jax.value_and_grad(_loss)(params, batch, args.match)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jax.tree.map(lambda a, p: EMA * a + (1 - EMA) * p, average, params), loss

    start = time.time()
    for i in range(args.steps):
        params, state, average, loss = step(params, state, average, batches.batch(args.seed, i))
        if i % 100 == 99 or i == args.steps - 1:
            builtin.save(average, args.out)
            print(
                f"{i + 1} {time.time() - start:.0f}s loss {loss:.3f} {_format_metrics(args.out, ('validation',))}",
                flush=True,
            )
    print("validation and test:", _format_metrics(args.out, ("validation", "test")))


def _format_metrics(path: Path, splits: Sequence[str]) -> str:
    """Evaluate the weights in the file. Settings were chosen by the validation concepts; the test concepts are used at the end."""
    images, captions, split_of = open_emoji(network.SIZE)
    rows = [i for i, split in enumerate(split_of) if split in splits]
    encoder = builtin.BuiltinEncoder(builtin.load(path))
    text, image = encoder.embed_texts([captions[i] for i in rows]), encoder.embed_images(images[rows])
    metrics = {"cosine": float((text * image).sum(-1).mean()), **recall(text, image)}
    return f"among {len(rows)}: " + " ".join(f"{name} {value:.3f}" for name, value in metrics.items())


def _teacher(path: Path, captions: list[str]) -> list[np.ndarray]:
    """Return the embeddings [styles, emoji, D] of text and image. Within each style, the rows must have the order of the captions."""
    with np.load(path) as file:
        source, caption = file["source"], file["caption"]
        styles = [np.flatnonzero(source == name) for name in dict.fromkeys(source.tolist())]
        assert all((caption[rows] == np.array(captions)).all() for rows in styles)
        return [
            np.stack([file[name][rows].astype(np.float32) for rows in styles]) for name in ("text_embed", "image_embed")
        ]


class _Batches:
    """Batches as a pure function of (seed, step). Each image of a concept with many variants is sampled less often."""

    def __init__(self, images: np.ndarray, captions: list[str], teacher: Any) -> None:
        self.images, self.captions, self.teacher = images, captions, teacher
        if teacher:
            # A caption describes only what all styles of its emoji have in common.
            mean = teacher[1].mean(0)
            self.mean = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
        concepts = [find_concept(caption) for caption in captions]
        counts = {name: concepts.count(name) for name in set(concepts)}
        chance = np.array([counts[name] ** -0.5 for name in concepts])
        self.chance = chance / chance.sum()
        bag = featurize(captions)
        used = int((bag.words > 0).sum(1).max())
        self.featurized = bag._replace(words=bag.words[:, :used], parts=bag.parts[:, :used])
        _, self.same = np.unique(images.reshape(len(images), -1), axis=0, return_inverse=True)
        self.sided = np.array(
            [any(w in c for w in ("left", "right", "flag", "button", "keycap", "letter")) for c in captions]
        )

    def batch(self, seed: int, step: int) -> dict[str, Any]:
        random = np.random.default_rng((seed, step))
        rows = random.choice(len(self.captions), BATCH, replace=False, p=self.chance)
        words, parts = self.featurized.words[rows], self.featurized.parts[rows]
        bare = random.random((BATCH, 1)) < 0.25
        drop = (parts == KEYWORD) & (bare | (random.random(words.shape) < 0.3)) | (random.random(words.shape) < 0.1)
        kept = np.where(drop, 0, words)
        words = np.where((kept > 0).any(1, keepdims=True), kept, words)
        # Keep only the words of this batch; word 0 stays first.
        used, numbers = np.unique(np.append(words, 0), return_inverse=True)
        features = np.zeros((MAX_WORDS, self.featurized.features.shape[1]), np.int32)
        features[: len(used)] = self.featurized.features[used]
        features[:, 0] *= random.random(len(features)) > 0.4
        features *= random.random(features.shape) > 0.2
        batch = {
            "features": features,
            "words": numbers[:-1].reshape(words.shape).astype(np.int32),
            "parts": parts,
            "pixels": self._augment(self.images[rows], self.sided[rows], random),
            "same": self.same[rows],
        }
        if self.teacher:
            texts, images = self.teacher
            style = random.integers(len(images))
            batch |= {
                "rows": rows,
                "all_same": self.same,
                "texts": texts[0],
                "images": images[0],
                "style": images[style],
            }
        return batch

    def _augment(self, images: np.ndarray, sided: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Rotate, scale, shift, mirror (unless left and right matter) and tint the images, and cover a part of half of them."""
        n, size = len(images), network.SIZE
        turn, scale = random.uniform(-0.25, 0.25, n), np.exp(random.uniform(-0.2, 0.2, n))
        mirror = np.where(~sided & (random.random(n) < 0.5), -1.0, 1.0)
        grid = np.arange(size) - (size - 1) / 2
        y, x = grid[None, :, None], grid[None, None, :] * mirror[:, None, None]
        cos, sin = ((f(turn) * scale)[:, None, None] for f in (np.cos, np.sin))
        dy, dx = random.uniform(-3, 3, (2, n, 1, 1))
        middle = (size - 1) / 2
        out = _interpolate(images, cos * y + sin * x + dy + middle, cos * x - sin * y + dx + middle)
        for i in np.flatnonzero(random.random(n) < 0.5):
            top, left = random.integers(0, size - 10, 2)
            out[i, top : top + 10, left : left + 10] = random.integers(0, 256)
        gain, shift = random.uniform(0.85, 1.15, (n, 1, 1, 3)), random.uniform(-12, 12, (n, 1, 1, 3))
        return np.clip(out * gain + shift, 0, 255).astype(np.float32)


def _interpolate(images: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sample the images at these coordinates, bilinearly; coordinates beyond the edge are clamped."""
    last = images.shape[1] - 1
    y, x = np.clip(y, 0, last), np.clip(x, 0, last)
    y0, x0 = np.minimum(y.astype(int), last - 1), np.minimum(x.astype(int), last - 1)
    fy, fx = (y - y0)[..., None].astype(np.float32), (x - x0)[..., None].astype(np.float32)
    row = np.arange(len(images))[:, None, None]
    upper = images[row, y0, x0] * (1 - fx) + images[row, y0, x0 + 1] * fx
    lower = images[row, y0 + 1, x0] * (1 - fx) + images[row, y0 + 1, x0 + 1] * fx
    return upper * (1 - fy) + lower * fy


def _loss(params: Any, batch: Any, match: float) -> Any:
    text = network.encode_text(params.text, batch["features"], batch["words"], batch["parts"])
    image = network.encode_image(params.image, batch["pixels"])
    here = jnp.arange(len(text))
    loss = _contrast(text, image, here, batch["same"], batch["same"])
    loss += _contrast(image, text, here, batch["same"], batch["same"])
    if "rows" in batch:
        # The negatives are the teacher's embeddings of all training emoji, not only of those in this batch.
        rows, same = batch["rows"], (batch["same"], batch["all_same"])
        loss += _contrast(text, batch["style"], rows, *same) + _contrast(image, batch["texts"], rows, *same)
        loss += match * (1 - (text * batch["texts"][rows]).sum(-1).mean())
        loss += match * (1 - (image * batch["images"][rows]).sum(-1).mean())
    return loss / 2


def _contrast(rows: Any, others: Any, right: Any, same_rows: Any, same_others: Any) -> Any:
    """Contrastive loss. Other rows with an identical image are neither positives nor negatives."""
    scores = rows @ others.T / TEMPERATURE
    own = jnp.take_along_axis(scores, right[:, None], 1)[:, 0]
    is_own = jnp.arange(len(others)) == right[:, None]
    scores = jnp.where((same_rows[:, None] == same_others) & ~is_own, -1e9, scores)
    return (jax.nn.logsumexp(scores, 1) - own).mean()


if __name__ == "__main__":
    main()
