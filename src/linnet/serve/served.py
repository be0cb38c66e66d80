"""A served token model: its engine, sessions, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from linnet.models.base import TokenFamily
from linnet.serve.chat_template import PLAIN, Template
from linnet.serve.engine import Engine, EngineConfig
from linnet.serve.request import OnEvent, Request
from linnet.serve.session_folder import FolderSessions
from linnet.serve.sessions import MAX_BYTES, MemorySessions
from linnet.tokenizers.base import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    shape: tuple[int, int, int] | None
    template: Template
    family: str
    n_vocab: int
    bos_id: int | None
    context: int | None
    created: int
    engine: Engine
    sessions: MemorySessions | FolderSessions

    @property
    def state_bytes(self) -> int:
        return self.engine.backend.state_bytes

    @property
    def fingerprint(self) -> str:
        return self.engine.fingerprint

    def submit(self, request: Request, on_event: OnEvent) -> None:
        self.engine.submit(request, on_event)

    def cancel(self, id: str) -> None:
        self.engine.cancel(id)

    def stats(self) -> dict[str, float]:
        return {**self.engine.stats(), "sessions": len(self.sessions), "session_bytes": self.sessions.n_bytes}


def serve_model(
    name: str,
    family: TokenFamily,
    cfg: Any,
    params: Any,
    buffers: Any,
    tokenizer: Tokenizer,
    shape: tuple[int, int, int] | None,
    config: EngineConfig,
    template: Template = PLAIN,
    session_bytes: int = MAX_BYTES,
    session_folder: Path | None = None,
) -> ServedModel:
    """Compile a model's programs and start its engine. Without a folder, sessions end with this process."""
    engine = Engine(family, cfg, params, buffers, tokenizer, config)
    engine.backend.warm_up()
    abstract_state, fingerprint = engine.backend.abstract_state, engine.fingerprint
    if session_folder is None:
        sessions = MemorySessions(abstract_state, fingerprint, max_bytes=session_bytes)
    else:
        sessions = FolderSessions(session_folder, abstract_state, fingerprint, max_bytes=session_bytes)
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        shape=shape,
        template=template,
        family=family.name,
        n_vocab=cfg.n_vocab,
        bos_id=cfg.bos_id,
        context=cfg.context,
        created=int(time.time()),
        engine=engine.start(),
        sessions=sessions,
    )
