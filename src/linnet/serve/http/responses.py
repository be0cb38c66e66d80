"""Response types with OpenAI's field names. They serve the type checker and /openapi.json, without run-time validation."""

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
    """Extension: tokens truncated from the prompts' starts (`truncate_prompt`), not counted in `prompt_tokens`."""


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    top_token_ids: list[list[int] | None] | None
    """Extension: the ids of `top_logprobs`, likeliest first, because two ids may have the same text."""


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]


class Likely(TypedDict):
    token: str
    token_id: int
    """Extension, because two ids may have the same text."""
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
    """As in `usage`, also in stream chunks; only present if a prompt was truncated."""
    state: NotRequired[str]
    """base64; only present with `return_state`."""


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


class NearPicture(TypedDict):
    row: int
    """Row in the gallery, which is the model's data in the order train, validation, test."""
    cosine: float
    caption: str | None
    b64_json: str | None
    """PNG, if the gallery has images."""


class Candidate(TypedDict):
    embedding: list[float]
    seed: int
    cosine: float | None
    """Cosine similarity to the text embedding; null if their widths differ."""


class PriorResult(Candidate):
    """The candidate closest to the text, and all candidates."""

    index: int
    object: Literal["prior.embedding"]
    best: int
    candidates: list[Candidate]
    nearest: list[NearPicture] | None
    """Nearest images of the best candidate; null unless requested."""


class PriorAnswer(TypedDict):
    id: str
    object: Literal["prior.sample"]
    created: int
    model: str
    system_fingerprint: str
    steps: int
    """Steps that the solver took."""
    guidance: float
    """Guidance scale as applied: 1 if the model does not support guidance."""
    data: list[PriorResult]


class RoleCard(TypedDict):
    prefix: str
    suffix: str


class TemplateCard(TypedDict):
    beginning: str
    roles: dict[str, RoleCard]
    answer: str
    stop: list[str]
    between: str


class JinjaCard(TypedDict):
    jinja: str
    """Source of a Hugging Face chat template."""


class TokenizerCard(TypedDict):
    kind: str
    rules: Literal["exact", "released"]
    """`exact`: every byte string round-trips unchanged. `released`: encodes and decodes like the library of the tokenizer's file."""
    byte_exact: bool


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    fingerprint: str
    family: str
    n_vocab: int
    begin_id: int | None
    """BOS id before every sequence; null: the model has none, and an empty prompt is an error."""
    end_id: int
    tokenizer: TokenizerCard
    context: int | None
    """Maximum tokens of one sequence, prompt and answer together; null: unlimited."""
    state_bytes: int
    """Bytes of one conversation in its slot, independent of how much it has read."""
    picture: list[int] | None
    """Image height, width and channels, for pixel models."""
    chat_template: TemplateCard | JinjaCard
    """How /v1/chat/completions turns a conversation into a prompt."""


class PriorCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    fingerprint: str
    family: Literal["prior"]
    width: int
    """Width of the generated embeddings."""
    text_width: int
    """Width of the input embeddings and encodings."""
    timesteps: int
    """Maximum steps of a sample."""
    takes_text: bool
    """Whether `input` is supported; otherwise only embeddings."""
    max_encodings: int
    """Maximum token encodings per text; 0: the model takes none."""
    can_guide: bool
    gallery: int
    """Number of images that `nearest` searches; 0: there is no gallery."""
    pictures: bool
    """Whether the gallery has images, not only captions."""
    state_bytes: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard | PriorCard]


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
