"""The answers, field by field as OpenAI names them; the types serve the checker and /openapi.json, and cost nothing at run time."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class ProblemDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Problem(TypedDict):
    error: ProblemDetail


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens]
    prompt_tokens_cut: NotRequired[int]
    """Ours: tokens cut off the prompts' fronts (`truncate_prompt`), which are not among `prompt_tokens`."""


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    top_token_ids: list[list[int] | None] | None
    """Ours: the ids of `top_logprobs`, likeliest first; two ids may have the same text."""


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]


class Likely(TypedDict):
    token: str
    token_id: int
    """Ours: two ids may have the same text."""
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Likely):
    top_logprobs: list[Likely]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    prompt_tokens_cut: NotRequired[int]
    """As in `usage`, also of a stream; only where something was cut."""
    state: NotRequired[str]
    """base64; only where `return_state` asked for it."""


class TextAnswer(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatAnswer(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Picture(TypedDict):
    b64_json: str


class ImageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ImagesAnswer(TypedDict):
    created: int
    data: list[Picture]
    output_format: Literal["png"]
    size: str
    usage: ImageUsage


class RoleCard(TypedDict):
    prefix: str
    suffix: str


class TemplateCard(TypedDict):
    beginning: str
    roles: dict[str, RoleCard]
    answer: str
    stop: list[str]
    between: str


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    fingerprint: str
    family: str
    n_vocab: int
    context: int | None
    """Most tokens that one text may have, prompt and answer together; null: any number."""
    state_bytes: int
    """Of one conversation in its slot, however much it has read."""
    picture: list[int] | None
    """Height, width and channels, for pixel models."""
    chat_template: TemplateCard
    """How /v1/chat/completions makes one text of a conversation."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    tokens: list[int]
    pieces: list[str]
    count: int


class Text(TypedDict):
    text: str


class SessionCard(TypedDict):
    id: str
    object: Literal["session"]
    model: str
    n_tokens: int
    state_bytes: int


class Deleted(TypedDict):
    id: str
    object: Literal["session"]
    deleted: Literal[True]


class Status(TypedDict):
    status: str
