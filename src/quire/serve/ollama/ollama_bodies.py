"""Bodies of Ollama's API, as strict structs. Refuses to know: how a request is carried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.serve.core.fields import (
    MAX_TOOLS,
    BlendField,
    Int,
    JsonSchema,
    Name,
    SessionId,
    SessionTtl,
    ToolName,
    extension,
    left_out,
    noted,
    refused,
    unused,
)
from quire.serve.core.token_logprobs import ChatTokenLogprob
from quire.serve.core.turns import plain_call
from quire.text import Tool
from quire.types.errors import InputError
from quire.types.sampling_params import MAX_LOGPROBS

LOADED = "the model is loaded already"
NoList = Annotated[list[Any], Meta(max_length=0)]
KeepAlive = Annotated[
    str | float, noted("of several models: how long it stays loaded after this; one alone, or pinned, stays")
]
Think = Annotated[bool | Literal["low", "medium", "high"], noted("where the model thinks; levels go to its template")]
Format = Annotated[Literal["", "json"] | JsonSchema, noted("json, or a JSON schema")]


Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # whole numbers may be written with a point, as Ollama takes them
GONE = "Ollama ignores it too"


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`options` of a request. Values beyond what they can mean are taken for the nearest that does, as Ollama does."""

    seed: Annotated[Number, noted("-1: any")] | None = None
    num_predict: Annotated[Number, noted("below 0: to the end of the context")] | None = None
    temperature: Number | None = None
    top_k: Annotated[Number, noted("0 and below: off")] | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repeat_penalty: Annotated[Number, noted("of the whole context")] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | list[str] | None = None

    num_ctx: Annotated[Number, unused(LOADED)] | None = None
    num_batch: Annotated[Number, unused(LOADED)] | None = None
    num_gpu: Annotated[Number, unused(LOADED)] | None = None
    main_gpu: Annotated[Number, unused(LOADED)] | None = None
    num_thread: Annotated[Number, unused(LOADED)] | None = None
    num_keep: Annotated[Number, unused("contexts are never shifted")] | None = None
    numa: Annotated[bool, unused(LOADED)] | None = None
    low_vram: Annotated[bool, unused(LOADED)] | None = None
    f16_kv: Annotated[bool, unused(LOADED)] | None = None
    logits_all: Annotated[bool, unused(LOADED)] | None = None
    vocab_only: Annotated[bool, unused(LOADED)] | None = None
    use_mmap: Annotated[bool, unused(LOADED)] | None = None
    use_mlock: Annotated[bool, unused(LOADED)] | None = None
    embedding_only: Annotated[bool, unused(LOADED)] | None = None

    repeat_last_n: Annotated[Any, left_out(-1, why="penalties see the whole context")] = None
    typical_p: Annotated[Any, left_out(1, 1.0)] = None
    tfs_z: Annotated[Any, unused(GONE)] = None
    mirostat: Annotated[Any, unused(GONE)] = None
    mirostat_tau: Annotated[Any, unused(GONE)] = None
    mirostat_eta: Annotated[Any, unused(GONE)] = None
    penalize_newline: Annotated[Any, unused(GONE)] = None


class OllamaFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]
    index: Int | None = None


class OllamaCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: OllamaFunction
    id: str = ""
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoList | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.role == "tool":
            message |= {"name": self.tool_name or "", "tool_call_id": self.tool_call_id or ""}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                plain_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        return message


class OllamaFunctionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None


class OllamaTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: OllamaFunctionSpec
    type: Literal["function"] | None = None

    def tool(self) -> Tool:
        spec = self.function
        return Tool(name=spec.name, description=spec.description or "", parameters=spec.parameters or {})


class OllamaRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name
    options: Annotated[OllamaOptions, noted("see the table of options")] | None = None
    keep_alive: KeepAlive | None = None


class OllamaAnswerRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    stream: Annotated[bool, noted("true by default")] | None = None
    format: Format | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    session_id: SessionId | None = None
    session_ttl: SessionTtl | None = None
    blend: BlendField | None = None


class OllamaChatRequest(OllamaAnswerRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaAnswerRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: Annotated[bool, noted("the prompt is taken as it is, without the chat template")] | None = None
    suffix: Annotated[Any, refused("")] = None
    template: Annotated[Any, refused("", why="the model's own is used")] = None
    context: Annotated[Any, refused([], why="use /api/chat")] = None
    images: Annotated[Any, refused([])] = None
    width: Annotated[Any, refused()] = None
    height: Annotated[Any, refused()] = None
    steps: Annotated[Any, refused()] = None


class OllamaEmbedRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/embed."""

    input: Annotated[str | list[str], noted("nothing: no embeddings")] | None = None
    truncate: Annotated[bool, noted("cut inputs to the context (default)")] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class OllamaEmbeddingsRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/embeddings."""

    prompt: Annotated[str, noted("nothing: an empty embedding")] | None = None


class _Named(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name | None = None
    name: Annotated[str, extension("an older name of model")] | None = None

    def named(self) -> str:
        if not (name := self.model or self.name):
            raise InputError("required field 'model' is missing", param="model", code="missing_required_parameter")
        return name


class OllamaShowRequest(_Named, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/show."""

    verbose: Annotated[bool, unused("there is no more to say")] | None = None


class OllamaNamed(_Named, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/pull and DELETE /api/delete."""

    stream: Annotated[bool, noted("true by default")] | None = None
    insecure: Annotated[bool, unused("the hub's address is the server's business")] | None = None


class OllamaCopyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/copy."""

    source: Name
    destination: Name


# ---- answers ------------------------------------------------------------------------------------------------


class OllamaReply(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OllamaChatAnswer(_Answer, kw_only=True):
    """An answer, or a line of one."""

    message: OllamaReply


class OllamaGenerateAnswer(_Answer, kw_only=True):
    """An answer, or a line of one."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str = ""
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaShowAnswer(msgspec.Struct, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaProgress(msgspec.Struct, kw_only=True):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OllamaVersion(msgspec.Struct):
    version: str


class OllamaError(msgspec.Struct):
    """Errors of /api."""

    error: str
