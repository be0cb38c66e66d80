"""What a client may ask: every field, its type and its bounds. Unknown fields are refused, since to ignore one would be a lie."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from linnet.models.prior.solver import Solver
from linnet.nn.sampling_bounds import MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from linnet.serve.prior.request import MAX_GUIDANCE
from linnet.serve.request import MAX_BIAS, MAX_SEED, MAX_STOPS, MAX_TOP

MAX_ANSWERS = 128
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: a list of a million wrong entries is one mistake, not a million.
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

MAX_NEAREST, MAX_TOLD = 64, 256
Caption = Annotated[str, Field(min_length=1, max_length=1 << 13)]
Captions = Annotated[list[Caption], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]
Vector = Annotated[list[float], Field(fail_fast=True, min_length=1, max_length=1 << 14)]
Vectors = Annotated[list[Vector], Field(fail_fast=True, min_length=1, max_length=1 << 10)]
SeveralVectors = Annotated[list[Vectors], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWERS)]


class ApiRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, protected_namespaces=())

    model: str | None = None
    """Left out: the first model of the server that can do it."""


class SamplingRequest(ApiRequest):
    """The fields of every call that draws tokens."""

    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Answer i of several has the seed `seed + i`."""
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
    """The fields that completions and chat share."""

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
    """In Lark's notation."""
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    """False: the model's begin id is not put in front of the prompt. A continued session or state has none in any case."""
    truncate_prompt: bool | None = None
    """A prompt that does not fit the model's context loses its front; without this it is refused."""
    session: str | None = None
    """Goes on from this session, and leaves it where the answer ends."""
    state: str | None = None
    """Goes on from this state, as `return_state` gave it (base64)."""
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
    # A client sends an answer's message back as it got it, with these fields empty.
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
    """Pixel models draw without a text."""
    size: str | None = Field(None, pattern=r"^(auto|[0-9]{1,5}x[0-9]{1,5})$")
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    partial_images: int | None = Field(None, ge=0, le=256)
    """So many unfinished pictures are sent before the whole one, where `stream` is true."""


class PriorRequest(ApiRequest):
    """Of `input` and `embeddings` exactly one is given."""

    input: Annotated[Caption | Captions, Field(union_mode="left_to_right")] | None = None
    embeddings: Annotated[Vector | Vectors, Field(union_mode="left_to_right")] | None = None
    """Of texts, as the model's encoder gives them."""
    text_encodings: Annotated[Vectors | SeveralVectors, Field(union_mode="left_to_right")] | None = Field(
        None, validation_alias=AliasChoices("text_encodings", "encodings")
    )
    """Of each text's tokens, beside its embedding: needed by models that were trained with them. Its old name is `encodings`."""
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    """Candidates for each text; number i has the seed `seed + i`."""
    guidance: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    steps: int | None = Field(None, ge=2, lt=2**31)
    """At most as many as the model was trained with; left out: 16 of dpm, 64 of ddim, all of ddpm."""
    solver: Solver | None = None
    """Left out: dpm."""
    eta: float | None = Field(None, ge=0, le=1)
    """Of ddim: 0 adds no noise on the way."""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    nearest: int | None = Field(None, ge=0, le=MAX_NEAREST)
    """So many of the gallery's images are told that each result is nearest to."""
    progress: int | None = Field(None, ge=0, le=MAX_TOLD)
    """How often a stream tells how far each candidate is."""
    stream: bool | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    deadline_seconds: float | None = Field(None, gt=0)


class TokenizeRequest(ApiRequest):
    text: str
    add_special_tokens: bool | None = None
    """True: with the model's begin id in front, if it has one."""


class DetokenizeRequest(ApiRequest):
    tokens: Ids


class SessionRequest(ApiRequest):
    pass
