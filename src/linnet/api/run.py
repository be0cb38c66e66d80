"""`Run`: generation, scoring, sessions and evaluation with a trained model. `linnet.load` makes one."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from linnet.api.results import GeneratedText, Score
from linnet.api.session import Session, read_state
from linnet.api.text import MAX_TOKENS, TOP_P, generate_texts, score_text, to_utf8
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

    from linnet.api.evaluation import EvaluationResult
    from linnet.api.images import EmbeddingSamples, Images
    from linnet.api.text import Ids, Prompt, Prompts, SamplingOptions
    from linnet.config.schema import RunConfig
    from linnet.runs.load import LoadedRun
    from linnet.serve.engine import Engine

Split = Literal["train", "validation", "test"]


class Run:
    """A trained model with its weights in memory. `linnet.load` makes one."""

    def __init__(self, loaded: LoadedRun, *, weights: WeightDtype = "float32", mesh: str = "") -> None:
        self.loaded = loaded
        """Weights, buffers and vocabulary, for code that uses the layers below this API."""
        self._mesh = mesh
        self.weights: WeightDtype = weights
        """Dtype of the weights."""

    @property
    def path(self) -> Path:
        """The run's folder, or the exported file."""
        return self.loaded.folder

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return self.loaded.cfg

    @property
    def step(self) -> int:
        """The training step of the checkpoint; 0 for imported and exported weights."""
        return self.loaded.step

    @property
    def kind(self) -> Literal["text", "images", "prior"]:
        """What the model generates: text, images, or image embeddings."""
        if not self.config.reads_tokens:
            return "prior"
        return "text" if self.loaded.vocabulary.shape is None else "images"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, family={self.config.family!r}, kind={self.kind!r}, step={self.step})"

    def _repr_html_(self) -> str:
        import html

        from linnet.core import params

        count = params.count(self.loaded.family.param_specs(self.config.model))
        rows = {
            "run": str(self.path),
            "family": f"{self.config.family} ({self.kind})",
            "parameters": f"{count:,} ({self.weights})",
            "step": f"{self.step:,}",
            "trained on": self.config.data.source,
        }
        cells = (f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>"

    # Tokens

    def encode(self, text: str | bytes) -> Ids:
        """Return the token ids of a text, without BOS and EOS ids."""
        self._need("encode", "text")
        return self.loaded.vocabulary.tokenizer.encode(to_utf8(text))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        self._need("decode", "text")
        from linnet.tokenizers.base import decode_text

        return decode_text(self.loaded.vocabulary.tokenizer, [int(token) for token in ids])

    # Text

    @overload
    def generate(
        self, prompt: Prompt = "", *, stream: Literal[False] = False, **options: Unpack[SamplingOptions]
    ) -> GeneratedText: ...

    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[False] = False, **options: Unpack[SamplingOptions]
    ) -> list[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: Prompt = "", *, stream: Literal[True], **options: Unpack[SamplingOptions]
    ) -> Iterator[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[True], **options: Unpack[SamplingOptions]
    ) -> Iterator[list[GeneratedText | None]]: ...

    def generate(
        self,
        prompt: Prompt | Prompts = "",
        *,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        top_p: float = TOP_P,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        add_special_tokens: bool = True,
        echo: bool = False,
        stream: bool = False,
    ) -> Any:
        """Generate text that continues a prompt.

        The same prompt, settings and seed always give the same text: alone or in a list, here, with `linnet sample` (which has the
        same defaults) and from the server.

        Args:
            prompt: A text, bytes, or an array of token ids. A list of prompts is generated as one batch.
            max_tokens: Maximum number of new tokens. A `moe` model also stops at its context length.
            temperature: Sampling temperature. 0: greedy.
            top_p: Nucleus sampling threshold. 1: off.
            top_k: Sample from the k most likely tokens. 0: all.
            min_p: Minimum probability relative to the most likely token.
            repetition_penalty: Divides the logits of tokens that occurred before. 1: off.
            seed: Random seed, 0 to 2**32 - 1; a list gives one per prompt.
            stop: Stop strings, which are not part of the text.
            ignore_eos: Continue after EOS.
            add_special_tokens: Prepend the model's BOS id, if it has one.
            echo: Begin the text with the prompt.
            stream: Return an iterator over pieces of text as they are generated. For a list of prompts it yields a list with one piece
                per prompt, None for prompts that finished earlier.

        Returns:
            The text, without the prompt unless `echo`; a list of texts for a list of prompts.
        """
        self._need("generate", "text")
        return generate_texts(
            self.loaded,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
            add_special_tokens=add_special_tokens,
            echo=echo,
            stream=stream,
        )

    @overload
    def score(self, text: str | bytes) -> Score: ...

    @overload
    def score(self, text: list[str] | list[bytes]) -> list[Score]: ...

    def score(self, text: str | bytes | list[str] | list[bytes]) -> Score | list[Score]:
        """Compute the log-probability of each token of a text, and its bits per byte.

        The text is one sequence of any length (for a `moe` model: up to its context).

        Args:
            text: A text, or a list of texts. The result of a text does not depend on the others.

        Returns:
            The score, or a list of scores for a list of texts.
        """
        self._need("score", "text")
        self._need_one_device("score")
        if isinstance(text, list | tuple):
            return [score_text(self.loaded, one, self._nats) for one in text]
        return score_text(self.loaded, text, self._nats)

    def session(self, source: str | os.PathLike[str] | bytes | None = None) -> Session:
        """Start a conversation, or restore one.

        Args:
            source: A file that `Session.save` or the server wrote, or its bytes. Default: an empty conversation.

        Raises:
            UserError: If the file is damaged, or was made by a model with other weights.
        """
        self._need("session", "text")
        engine = self._engine
        if source is None:
            return Session(self, engine, self.loaded.vocabulary.tokenizer)
        from linnet.serve.state import from_bytes

        state = from_bytes(read_state(source), engine.backend.abstract_state, engine.fingerprint)
        return Session(self, engine, self.loaded.vocabulary.tokenizer, state)

    # Images and embeddings

    def generate_images(
        self,
        n: int = 1,
        *,
        complete: Sequence[str | os.PathLike[str]] = (),
        keep: float = 0.5,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> Images:
        """Generate images with a model of pixels.

        Args:
            n: Number of images, or of images per file in `complete`. The first does not depend on it.
            complete: Image files to complete from their upper part, which is kept.
            keep: Fraction of the rows of `complete` that is kept.
            temperature: Sampling temperature. 0: greedy.
            top_p: Nucleus sampling threshold. 1: off.
            top_k: Sample from the k most likely values. 0: all.
            min_p: Minimum probability relative to the most likely value.
            repetition_penalty: Divides the logits of values that occurred before. 1: off.
            seed: Random seed. Image i uses seed + i.
        """
        self._need("generate_images", "images")
        from linnet.api.images import generate_images

        return generate_images(
            self.loaded,
            n,
            [Path(path) for path in complete],
            keep,
            seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )

    def sample(
        self,
        texts: str | Sequence[str] = (),
        *,
        embeddings: Float32[np.ndarray, "*B X"] | None = None,
        text_encodings: Float32[np.ndarray, "*B L X"] | None = None,
        n: int = 1,
        steps: int | None = None,
        solver: Literal["dpm", "ddim", "ddpm"] = "dpm",
        guidance: float = 1.0,
        seed: int = 0,
        nearest: int = 8,
    ) -> EmbeddingSamples:
        """Sample image embeddings of texts with a prior.

        Args:
            texts: One text or several. The result of a text does not depend on the others.
            embeddings: Text embeddings instead of texts, one per row.
            text_encodings: Token encodings of `embeddings`, for a prior that was trained with them.
            n: Candidates per text, of which the most similar to the text is kept.
            steps: Sampling steps. Default: 16 with dpm, 64 with ddim, all with ddpm.
            solver: DPM-Solver++(2M), DDIM or DDPM.
            guidance: Classifier-free guidance scale. 1: none.
            seed: Random seed. Candidate i uses seed + i.
            nearest: Number of nearest images of the prior's data to find, if it is available.
        """
        self._need("sample", "prior")
        from linnet.api.images import sample_embeddings

        return sample_embeddings(
            self.loaded,
            texts,
            embeddings,
            text_encodings,
            n=n,
            steps=steps,
            solver=solver,
            guidance=guidance,
            seed=seed,
            nearest=nearest,
        )

    # Evaluation

    def evaluate(
        self,
        split: Split = "validation",
        *,
        source: str | os.PathLike[str] | None = None,
        data_source: str | os.PathLike[str] | None = None,
        sequence_len: int | None = None,
        update_len: int | None = None,
        batch_size: int | None = None,
        limit: int | None = None,
        timesteps: Sequence[int] | None = None,
        weights: WeightDtype | None = None,
        quiet: bool = False,
    ) -> EvaluationResult:
        """Evaluate on a split of the run's data, or on other data, as `linnet eval` does.

        Every token (or pair) counts once, and the state is carried through each sequence.

        Args:
            split: train, validation or test.
            source: Other data: prepared data (its `split`), or all of a text file, folder or glob. For a prior: all pairs of another
                embedding dataset.
            data_source: New location of the run's own data, whose content must be that of training.
            sequence_len: Tokens per sequence, after which the state is reset. Default: that of the run.
            update_len: Tokens computed together. Affects speed and memory only.
            batch_size: Default: that of the run.
            limit: Maximum number of sequences (or pairs), spread evenly over the split.
            timesteps: Priors: numbers of sampling steps to evaluate.
            weights: Evaluate with the weights in this dtype, and compare with the weights as loaded.
            quiet: Show no progress.
        """
        from linnet.api.evaluation import evaluate_run
        from linnet.evaluate.run import EvalSettings

        self._need_one_device("evaluate")
        settings = EvalSettings(
            split=split,
            source=None if source is None else os.fspath(source),
            data_source=None if data_source is None else os.fspath(data_source),
            sequence_len=sequence_len,
            update_len=update_len,
            batch_size=batch_size,
            limit=limit,
            timesteps=None if timesteps is None else tuple(timesteps),
        )
        return evaluate_run(self.loaded, settings, self.weights, weights, quiet)

    # Internals

    @functools.cached_property
    def _engine(self) -> Engine:
        """The serving engine with one slot, which all sessions share. It stops with this object."""
        from linnet.serve.engine import Engine, EngineConfig

        run = self.loaded
        config = EngineConfig(n_slots=1, prefix_bytes=0)
        tokenizer = run.vocabulary.tokenizer
        engine = Engine(run.lm, self.config.model, run.params, run.buffers, tokenizer, config).start()
        weakref.finalize(self, engine.stop, within=0.0)
        return engine

    @functools.cached_property
    def _nats(self) -> Callable[..., Any]:
        from linnet.evaluate.language_model import make_nats

        return make_nats(self.loaded.lm, self.config)

    def _need(self, method: str, kind: Literal["text", "images", "prior"]) -> None:
        use = {
            "text": "generate(), score() or session()",
            "images": "generate_images()",
            "prior": "sample()",
        }
        what = {"text": "text", "images": "images", "prior": "image embeddings"}
        if self.kind != kind:
            needs = f"called on a run that generates {what[kind]} ({self.path} generates {what[self.kind]})"
            raise invalid(f"Run.{method}", "called", needs, f"use {use[self.kind]}")

    def _need_one_device(self, method: str) -> None:
        if self._mesh:
            raise invalid("mesh", self._mesh, f"left out for Run.{method}", "load the run again without a mesh")
