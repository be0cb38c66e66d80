"""Encoders of the open_clip package (`pip install linnet-lm[clip]`).

Token encodings are the outputs of the text transformer's last norm, as in DALLE2-pytorch's adapters: positions after the EOS token,
and positions with token 0 (padding, but also a "!" before other characters), are zeros.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64

from linnet.core.errors import UserError, invalid
from linnet.data.encoders.encoder import EncodedTexts
from linnet.data.images import FORMATS, BrokenImage, decode_pixels

HUB = "hf-hub:"
BATCH = 64
LAST_NORM = "ln_final"
"""Name of the text transformer's last norm, in a CLIP model or in its submodule `text`."""


class OpenClipEncoder:
    """An open_clip `Encoder`: MODEL/WEIGHTS as in `open_clip.list_pretrained()` (WEIGHTS may be a file), or hf-hub:OWNER/NAME."""

    def __init__(self, model: str) -> None:
        package = _import_open_clip()
        self.name = f"open_clip:{model}"
        self.fingerprint = hashlib.sha256(self.name.encode()).hexdigest()
        architecture, _, weights = (model, "", "") if model.startswith(HUB) else model.partition("/")
        if not weights and not model.startswith(HUB):
            # Without weights the package would return a randomly initialised network with only a log message.
            known = ", ".join(package.list_pretrained_tags_by_model(architecture)) or "none: the model is not known"
            raise invalid("--encoder", self.name, f"a model with its weights ({known})", f"use {self.name}/WEIGHTS")
        activation = _activation_flag(package, architecture, weights)
        try:
            self._model, _, self._prepare = package.create_model_and_transforms(
                architecture,
                pretrained=os.path.expanduser(weights) or None,
                **activation,
            )
            self._tokenize = package.get_tokenizer(architecture)
        except (RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
            # A weights file does not record that it needs the quick GELU, so the model name must.
            by_path = f"{architecture}-quickgelu/PATH" if activation else f"{architecture}/PATH"
            raise UserError(
                f"open_clip cannot open {model} ({_first_line(error)}). Fix: correct the name, or download its weights on a machine "
                f"with network access and use open_clip:{by_path}."
            ) from None
        self._model.eval()
        self._lock = threading.Lock()

    def decode(self, encoded: bytes) -> np.ndarray:
        from PIL import Image

        decode_pixels(encoded, 1)  # the same images count as broken for every encoder
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                return self._prepare(image.convert("RGB")).numpy()
        except (OSError, SyntaxError, ValueError):
            raise BrokenImage("broken") from None

    def embed_images(self, images: np.ndarray) -> Float32[np.ndarray, "n D"]:
        torch = importlib.import_module("torch")
        with torch.no_grad():
            blocks = [
                self._model.encode_image(torch.from_numpy(images[i : i + BATCH])).float().numpy()
                for i in range(0, len(images), BATCH)
            ]
        return _l2_normalize(np.concatenate(blocks))

    def embed_texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        return _l2_normalize(
            np.concatenate([self._encode(texts[i : i + BATCH])[0] for i in range(0, max(1, len(texts)), BATCH)])
        )

    @property
    def text_len(self) -> int:
        """Context length of the model (77) if its token encodings are as wide as its embeddings, else 0."""
        return 0 if self._no_encodings_reason else int(self._tokenize(["a linnet"]).shape[1])

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        if self._no_encodings_reason:
            raise UserError(
                f"{self.name} has no token encodings for a prior: {self._no_encodings_reason}. Fix: use --text-encodings none, or "
                "another model."
            )
        blocks = [self._encode(texts[i : i + BATCH]) for i in range(0, max(1, len(texts)), BATCH)]
        encodings = [np.where(_is_text(tokens, self._eos)[..., None], hidden, 0) for _, hidden, tokens in blocks]
        return EncodedTexts(_l2_normalize(np.concatenate([block[0] for block in blocks])), np.concatenate(encodings))

    @functools.cached_property
    def _eos(self) -> int | None:
        """EOS token of CLIP's own tokenizer; None for other tokenizers, whose padding differs."""
        eos = getattr(self._tokenize, "eot_token_id", None)
        return None if eos is None else int(eos)

    @functools.cached_property
    def _no_encodings_reason(self) -> str:
        """Reason why there are no token encodings; empty if there are."""
        if self._eos is None:
            return "its tokenizer is not CLIP's, so the padding positions are unknown"
        embeds, hidden, _ = self._encode(["a linnet"])
        if hidden.ndim != 3:
            return f"its text network has no norm {LAST_NORM} over all positions"
        if hidden.shape[2] != embeds.shape[1]:
            return (
                f"they are {hidden.shape[2]} wide and its embeddings {embeds.shape[1]}, but a prior needs equal widths"
            )
        return ""

    def _encode(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "n D"], Float32[np.ndarray, "n ..."], Int64[np.ndarray, "n L"]]:
        """Return unnormalised embeddings, outputs of the last norm (a 1-D array if there is none), and tokens."""
        torch = importlib.import_module("torch")
        tokens = self._tokenize(list(texts))
        outputs: list[Any] = []
        modules = dict(self._model.named_modules())
        norm = modules.get(LAST_NORM, modules.get(f"text.{LAST_NORM}"))
        with self._lock, torch.no_grad():  # the server is multi-threaded, and the hook is on the shared model
            handle = norm and norm.register_forward_hook(lambda module, inputs, output: outputs.append(output))
            try:
                embeds = self._model.encode_text(tokens).float().numpy()
            finally:
                if handle:
                    handle.remove()
        hidden = outputs[0].float().numpy() if outputs else np.zeros((len(embeds),), np.float32)
        return embeds, hidden, tokens.numpy()


def _activation_flag(package: Any, architecture: str, weights: str) -> dict[str, bool]:
    """Return the flag for weights trained with quick GELU; with the plain model name the package would only warn."""
    lookup = getattr(package, "get_pretrained_cfg", None)
    config = lookup(architecture, weights) if lookup and weights else {}
    return {"force_quick_gelu": True} if config and config.get("quick_gelu") else {}


def _is_text(tokens: Int64[np.ndarray, "n L"], eos: int | None) -> Bool[np.ndarray, "n L"]:
    """Return a mask of the positions up to and including the first EOS token, without token 0."""
    n_eos_before = np.cumsum(tokens == eos, axis=1) - (tokens == eos)
    return (n_eos_before == 0) & (tokens != 0)


def _l2_normalize(x: Float32[np.ndarray, "n D"]) -> Float32[np.ndarray, "n D"]:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _import_open_clip() -> Any:
    try:
        return importlib.import_module("open_clip")
    except ImportError:
        raise UserError(
            "--encoder open_clip needs the package open_clip, which is not installed. Fix: install linnet-lm[clip], or use "
            "--encoder builtin, which needs nothing."
        ) from None
