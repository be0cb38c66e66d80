"""Request types with the bounds of every field. Unknown fields are an error rather than silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from linnet.models.prior.solver import Solver
from linnet.nn.sampling_bounds import MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from linnet.serve.prior.request import MAX_GUIDANCE
from linnet.serve.request import MAX_BIAS, MAX_SEED, MAX_STOPS, MAX_TOP

MAX_ANSWERS = 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: a list of a million invalid entries is reported as one error.
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]
Prompt = Annotated[
    str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)],
    Field(union_mode="left_to_right"),
]
Temperature = Annotated[
    Annotated[float, Field(ge=0, le=0)] | Annotated[float, Field(ge=MIN_TEMPERATURE, le=100)],
    Field(union_mode="left_to_right"),
]
"""0 is greedy."""
Stop = Annotated[
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_STOPS)],
    Field(union_mode="left_to_right"),
]

MAX_NEAREST, MAX_PROGRESS = 64, 256
Caption = Annotated[str, Field(min_length=1, max_length=1 << 13)]
Captions = Annotated[list[Caption], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]
Vector = Annotated[list[float], Field(fail_fast=True, min_length=1, max_length=1 << 14)]
Vectors = Annotated[list[Vector], Field(fail_fast=True, min_length=1, max_length=1 << 10)]
SeveralVectors = Annotated[list[Vectors], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]


class ApiRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, protected_namespaces=())

    model: str | None = None
    """Default: the server's first model that supports the call."""


class SamplingRequest(ApiRequest):
    """Fields of every call that samples tokens."""

    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Answer i uses the seed `seed + i`."""
    user: str | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    deadline_seconds: float | None = Field(None, gt=0)
    stream: bool | None = None
    cache: bool | None = None
    """False: neither read from nor write to the prefix cache."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class PlainFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object"]


class NamedSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: NamedSchema


class TextRequest(SamplingRequest):
    """Fields shared by completions and chat."""

    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_BIAS)
    allowed_token_ids: Ids | None = Field(None, min_length=1)
    banned_token_ids: Ids | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: Stop | None = None
    stop_token_ids: Ids | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    """A Lark grammar."""
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    """False: do not prepend the model's BOS id. It is never added when a session or state is continued."""
    truncate_prompt: bool | None = None
    """Truncate a prompt that does not fit the model's context at its start; otherwise it is an error."""
    session: str | None = None
    """Continue this session, and store the state after the answer in it."""
    state: str | None = None
    """Continue from this state, as returned by `return_state` (base64)."""
    return_state: bool | None = None
    return_token_ids: bool | None = None


class CompletionRequest(TextRequest):
    prompt: Prompt = ""
    best_of: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], Field(union_mode="left_to_right")]
    name: str | None = None
    # Clients send an answer's message back as they received it, with these fields empty.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(TextRequest):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class ImageRequest(SamplingRequest):
    prompt: Literal[""] = ""
    """Must be empty: pixel models take no text."""
    size: str | None = Field(None, pattern=r"^(auto|[0-9]{1,5}x[0-9]{1,5})$")
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    partial_images: int | None = Field(None, ge=0, le=256)
    """Number of partial images sent before the complete one, with `stream`."""


class PriorRequest(ApiRequest):
    """Exactly one of `input` and `embeddings` must be given."""

    input: Annotated[Caption | Captions, Field(union_mode="left_to_right")] | None = None
    embeddings: Annotated[Vector | Vectors, Field(union_mode="left_to_right")] | None = None
    """Text embeddings from the model's encoder."""
    text_encodings: Annotated[Vectors | SeveralVectors, Field(union_mode="left_to_right")] | None = Field(
        None, validation_alias=AliasChoices("text_encodings", "encodings")
    )
    """Token encodings of each text, in addition to its embedding, for models trained with them. Formerly named `encodings`."""
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    """Candidates per text; candidate i uses the seed `seed + i`."""
    guidance: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    steps: int | None = Field(None, ge=2, lt=2**31)
    """At most the model's timesteps. Default: 16 for dpm, 64 for ddim, all for ddpm."""
    solver: Solver | None = None
    """Default: dpm."""
    eta: float | None = Field(None, ge=0, le=1)
    """DDIM's eta: 0 adds no noise between steps."""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    nearest: int | None = Field(None, ge=0, le=MAX_NEAREST)
    """Number of nearest gallery images returned with each result."""
    progress: int | None = Field(None, ge=0, le=MAX_PROGRESS)
    """Number of progress events per candidate in a stream."""
    stream: bool | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    deadline_seconds: float | None = Field(None, gt=0)


class TokenizeRequest(ApiRequest):
    text: str
    add_special_tokens: bool | None = None
    """True: prepend the model's BOS id, if it has one."""


class DetokenizeRequest(ApiRequest):
    tokens: Ids


class SessionRequest(ApiRequest):
    pass
