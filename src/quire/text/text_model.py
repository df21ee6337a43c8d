"""All that a model is to text: its tokenizer and its chat templates, loaded together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from quire.assets import LocalModel
from quire.assets.json_files import read_json
from quire.text.answer_reader import ChainedReader, Reader
from quire.text.call_formats.call_format import Schemas
from quire.text.call_formats.format_choice import choose_format
from quire.text.call_formats.harmony import HARMONY, HarmonyReader
from quire.text.from_files import tokenizer_from_files
from quire.text.from_gguf import tokenizer_from_gguf
from quire.text.reasoning_formats import choose_reasoning
from quire.text.reasoning_reader import ReasoningReader
from quire.text.template import CHATML, MAX_TEMPLATE, PLAIN, ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls import spell_out
from quire.text.tool_reader import ToolReader
from quire.types.errors import ModelFileError
from quire.types.grammar import ThoughtSpec

log = logging.getLogger("quire.text")


class TextModel:
    """Tokenizer and templates of one model. `notes` say what had to be assumed; they are logged when it loads.

    `tool_format` is how the model writes calls of tools and `reasoning` how it marks thoughts before an answer, if it
    does; `auto` reads both from its chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        name: str = "the model",
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ):
        self.tokenizer = tokenizer
        self.files: LocalModel | None = None  # that it was read from
        self.notes = [tokenizer.note] if tokenizer.note else []
        templates = dict(templates)
        if "default" not in templates:
            templates["default"] = self._assume(name)
        self._templates = {key: ChatTemplate(source, tokenizer.named) for key, source in templates.items()}
        self.tool_format = choose_format(tool_call_parser, templates.get("tool_use", templates["default"]))
        self._special_ids = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        self.reasoning = choose_reasoning(reasoning_parser, templates["default"])

    @classmethod
    def load(cls, model: LocalModel, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> TextModel:
        parsers = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
        if model.kind == "gguf":
            meta = model.open().metadata()
            text = cls(tokenizer_from_gguf(meta, str(model.path)), _templates_in_gguf(meta), model.name, **parsers)
        else:
            text = cls(tokenizer_from_files(model), _templates_in_files(model), model.name, **parsers)
        text.files = model
        for note in text.notes:
            log.warning(note)
        return text

    def _assume(self, name: str) -> str:
        """A template for a model without one: what its vocabulary suggests, and a note that it is a guess."""
        texts = {self.tokenizer.token_text(i) for i in self.tokenizer.special_ids}
        chatml = {"<|im_start|>", "<|im_end|>"} <= texts
        why = "ChatML, since its vocabulary has <|im_start|>" if chatml else "plain 'User: ... Assistant:' lines"
        self.notes.append(f"{name} has no chat template; chats are written as {why}. Answers may suffer")
        return CHATML if chatml else PLAIN

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text. Some models have a template of their own for conversations with tools; for those
        whose template knows none, tools are described in plain words."""
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        if "tools" not in template.source and (tools or any(message["role"] == "tool" for message in messages)):
            messages, tools = spell_out(messages, tools or (), self.tool_format), None
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        prefix: str = "",
        **variables: Any,
    ) -> list[int]:
        """The conversation as token ids, and after it the beginning of the answer, if one is given. The template
        writes BOS where it belongs, so none is added."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return self.tokenizer.encode(text + prefix, add_special=False)

    @property
    def reasons(self) -> bool:
        """Whether the model thinks before it answers."""
        return self.reasoning is not None

    def answer_reader(
        self, prompt: Sequence[int], tools: Schemas, parallel: bool = True, thoughts: bool = True
    ) -> Reader | None:
        """A reader of the answer to `prompt`; None: all of it is words. Some templates begin the thought themselves."""
        if self.tool_format is HARMONY:
            return HarmonyReader(tools, parallel, thoughts=self.reasons)
        calls = ToolReader(self.tool_format, tools, parallel) if tools else None
        thinking = self.reasoning_reader(prompt) if thoughts else None
        return ChainedReader(thinking, calls) if thinking and calls else thinking or calls

    def reasoning_reader(self, prompt: Sequence[int]) -> ReasoningReader | None:
        if self.reasoning is None or self.tool_format is HARMONY:
            return None
        return ReasoningReader(self.reasoning.ends_inside(self._end(prompt)), self.reasoning)

    @property
    def answer_lead(self) -> str:
        """What a grammar must write before an answer that is no call, in Lark's notation."""
        lead = self.tool_format.lead
        return self.tool_format.writer(self.special_id).text(lead) if lead else ""

    def thought(self, prompt: Sequence[int], budget: int | None = None, *, wanted: bool = True) -> ThoughtSpec | None:
        """The thought that precedes an answer to `prompt`; None: there is none, or the prompt itself has it. `wanted`:
        whether the model may begin one by itself."""
        format, end = self.reasoning, self._end(prompt)
        if format is None or format.ends_behind(end):
            return None
        inside = format.ends_inside(end)
        return ThoughtSpec(format.open, format.closes, inside, budget, format.gap) if inside or wanted else None

    def _end(self, prompt: Sequence[int]) -> str:
        return self.tokenizer.decode(prompt[-16:], skip_special_tokens=False)

    def hidden_marks(self, tools: bool) -> bool:
        """Whether text without special tokens would leave out marks that answers are read by."""
        marks = [*self.tool_format.all_marks()] if tools or self.tool_format is HARMONY else []
        marks += self.reasoning.marks() if self.reasoning else ()
        return any(self.special_id(mark) is not None for mark in marks)

    def special_id(self, token: str) -> int | None:
        """The id of a special token, which text leaves out unless told otherwise."""
        return self._special_ids.get(token)

    @property
    def template(self) -> str:
        return self._templates["default"].source


def load_tokenizer(model: LocalModel) -> Tokenizer:
    """The tokenizer alone."""
    if model.kind == "gguf":
        return tokenizer_from_gguf(model.open().metadata(), str(model.path))
    return tokenizer_from_files(model)


def _templates_in_gguf(meta: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key: value for key, value in meta.items() if key.startswith(prefix) and isinstance(value, str)}
    return {key.removeprefix(prefix).removeprefix(".") or "default": value for key, value in found.items()}


def _templates_in_files(model: LocalModel) -> dict[str, str]:
    """chat_template.jinja, else what tokenizer_config.json holds: one template or several with names."""
    path = model.file("chat_template.jinja")
    if path is not None:
        if path.stat().st_size > 4 * MAX_TEMPLATE:
            raise ModelFileError(f"{path} is too large for a chat template")
        return {"default": path.read_text(encoding="utf-8", errors="replace")}
    config = model.file("tokenizer_config.json")
    value = read_json(config).get("chat_template") if config else None
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    named = {e.get("name"): e.get("template") for e in entries if isinstance(e, dict)}
    return {k: v for k, v in named.items() if isinstance(k, str) and isinstance(v, str)}
