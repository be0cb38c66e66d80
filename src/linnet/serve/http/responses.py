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


class NearPicture(TypedDict):
    row: int
    """In the gallery: the model's data in order of train, validation, test."""
    cosine: float
    caption: str | None
    b64_json: str | None
    """PNG, where the gallery has pictures."""


class Candidate(TypedDict):
    embedding: list[float]
    seed: int
    cosine: float | None
    """To the text's embedding; null where their widths differ."""


class PriorResult(Candidate):
    """The candidate that is most like the text, and all of them."""

    index: int
    object: Literal["prior.embedding"]
    best: int
    candidates: list[Candidate]
    nearest: list[NearPicture] | None
    """Of the best; null unless asked for."""


class PriorAnswer(TypedDict):
    id: str
    object: Literal["prior.sample"]
    created: int
    model: str
    system_fingerprint: str
    steps: int
    """That the solver took."""
    guidance: float
    """That was applied: 1 where the model cannot be guided."""
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


class TokenizerCard(TypedDict):
    kind: str
    rules: Literal["exact", "released"]
    """`exact`: every byte string comes back as it was. `released`: as the library of the tokenizer's file encodes and decodes."""
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
    """Put in front of every sequence; null: nothing is, and an empty prompt is refused."""
    end_id: int
    tokenizer: TokenizerCard
    context: int | None
    """Most tokens that one text may have, prompt and answer together; null: any number."""
    state_bytes: int
    """Of one conversation in its slot, however much it has read."""
    picture: list[int] | None
    """Height, width and channels, for pixel models."""
    chat_template: TemplateCard
    """How /v1/chat/completions makes one text of a conversation."""


class PriorCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    fingerprint: str
    family: Literal["prior"]
    width: int
    """Of the embeddings it makes."""
    text_width: int
    """Of the embeddings and encodings it takes."""
    timesteps: int
    """Most steps of a sample."""
    takes_text: bool
    """Whether `input` may be words; else only embeddings."""
    max_encodings: int
    """Of one text; 0: it takes none."""
    can_guide: bool
    gallery: int
    """Images that `nearest` finds among; 0: there are none."""
    pictures: bool
    """Whether they can be shown."""
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
