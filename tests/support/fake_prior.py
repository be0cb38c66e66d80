"""A prior without arithmetic for the HTTP and playground tests: in a thread of its own it turns noise into its text, step by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from fake_model import talk

from linnet.serve.prior.request import Denoised, OnSampleEvent, Sampled, SampleRequest
from linnet.serve.prior.served import Neighbor
from linnet.serve.request import FinishReason, QueueFull

COLOURS = ("red", "green", "blue", "white")
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""


class FakePrior:
    """A text's embedding counts its letters; a sample is that, and a little of its seed. Its gallery is four colours."""

    family, created, fingerprint, state_bytes, timesteps = "prior", 1_700_000_000, "fp_prior", 2048, 100

    def __init__(
        self,
        name: str = "prior",
        *,
        width: int = 26,
        seconds_per_step: float = 0.0,
        takes_text: bool = True,
        max_encodings: int = 0,
        has_gallery: bool = True,
        most: int = 64,
        paused: bool = False,
        paced: bool = False,
    ) -> None:
        self.name, self.width, self.text_width, self.takes_text = name, width, 26, takes_text
        self.max_encodings, self.seconds_per_step, self.most = max_encodings, seconds_per_step, most
        self.gallery_rows, self.has_images, self.can_guide = 4 * has_gallery, has_gallery, True
        self.requests: list[SampleRequest] = []
        self.cancelled: set[str] = set()
        self.running: set[str] = set()
        self.gate = threading.Event()
        """A `paused` model takes no second step before this is set."""
        if not paused:
            self.gate.set()
        self.pace = threading.Semaphore(1) if paced else None
        """A paced model reports its next progress only when the reader has released this for the last one."""

    def encode(self, text: str) -> Any:
        return self.embed([text])[0], np.ones((2, 26), np.float32) if self.max_encodings else None

    def embed(self, texts: Sequence[str]) -> Any:
        return np.asarray([[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)

    def nearest(self, embedding: Any, k: int) -> list[Neighbor]:
        images = self.embed(COLOURS)
        likeness = images @ embedding / np.linalg.norm(images, axis=1) / max(1e-6, float(np.linalg.norm(embedding)))
        order = np.argsort(-likeness, kind="stable")[:k]
        return [Neighbor(row=int(i), cosine=float(likeness[i]), caption=COLOURS[i], image=DOT) for i in order]

    def submit(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        if len(self.running) >= self.most:
            raise QueueFull(len(self.running), 2.4)
        self.requests.append(request)
        self.running.add(request.id)
        threading.Thread(target=self._run, args=(request, on_event), daemon=True).start()

    def cancel(self, id: str) -> None:
        self.cancelled.add(id)

    def stats(self) -> dict[str, float]:
        return {"running": len(self.running), "steps_total": 7}

    def _run(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        n, parts, reason = request.steps or 64, request.n_progress + 1, "stop"
        found = self.made(request)
        for step in range(1, n + 1):
            time.sleep(self.seconds_per_step)
            while step > 1 and not self.gate.wait(0.005) and request.id not in self.cancelled and not _is_late(request):
                pass
            if request.id in self.cancelled:
                reason = "cancelled"
            elif _is_late(request):
                reason = "deadline"
            if reason != "stop":
                break
            if step < n and step * parts // n > (step - 1) * parts // n:
                noise = np.random.default_rng(step).standard_normal(self.width).astype(np.float32)
                if self.pace is not None:
                    self.pace.acquire()
                on_event(Denoised(step=step, n_steps=n, start=(step * found + (n - step) * noise) / n))
        self.running.discard(request.id)
        self._end(request, on_event, reason, found, n)

    def _end(self, request: SampleRequest, on_event: OnSampleEvent, reason: Any, found: Any, n: int) -> None:
        ending: FinishReason = reason
        embedding = found if ending == "stop" else None
        on_event(Sampled(reason=ending, error=None, embedding=embedding, n_steps=n))

    def made(self, request: SampleRequest) -> Any:
        """Seed 2 is the most like the text; 13 is no number."""
        found = np.zeros(self.width, np.float32)
        found[: min(26, self.width)] = request.text[: self.width]
        found[request.seed % self.width] += abs(request.seed - 2) / 4
        return found * np.float32(np.nan) if request.seed == 13 else found


def _is_late(request: SampleRequest) -> bool:
    return request.deadline is not None and time.monotonic() > request.deadline


def ask_prior(body: Any, model: FakePrior | None = None, **more: Any) -> httpx.Response:
    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/priors/sample", json=body)

    return talk(one, model or FakePrior(), **more)
