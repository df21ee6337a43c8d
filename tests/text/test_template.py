"""Chat templates: rendered as transformers renders them, and harmless whatever is in them."""

# ruff: noqa: E501 (templates are written as their makers write them)

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from quire.assets.local import at_path
from quire.text import ChatTemplate, TextModel, Tokenizer
from quire.text.template import MAX_TEMPLATE
from quire.types.errors import InputError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2 + 2?\n<b>&'\" "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Gr\u00fc\u00dfe \u043f 🙂"},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}
WITH_CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "weather", "content": '{"c": 7}'},
    {"role": "tool", "name": "weather", "content": "8"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says what "the" <weather> is',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

# Written in the manner of the families' own templates, to use what those use.
LLAMA_LIKE = """{%- set loop_messages = messages %}
{%- if tools is not none and tools|length > 0 %}
    {{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nTools:\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 and not tools %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

QWEN_LIKE = """{%- macro argument(name, value) -%}
{{ name ~ '=' ~ (value | string if value is not mapping else value | tojson) }}
{%- endmacro %}
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" and message.content is string and not(message.content.startswith('<r>')) %}
        {%- set ns.multi = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
<|im_start|>system
# Tools
<tools>
    {%- for tool in tools %}
{{ tool | tojson }}
    {%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {%- for key, value in tool_call.arguments|items %}{{- argument(key, value) }}{%- if not loop.last %}, {% endif %}{%- endfor %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (loop.nextitem and loop.nextitem.role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
{%- if 'a,b'.split(',')[-1] in ['b'] %}{{- ' '.join(['x', 'y']|map('upper')|list)|replace('X', 'z') }}{%- endif %}"""

MISTRAL_LIKE = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'tool' %}{% continue %}{% endif %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) and strict is defined %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}{% else %}{{ message.get('content', 'none')|upper }}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ tools|selectattr('type', 'equalto', 'function')|map(attribute='function.name')|join(', ') if tools }}
{{ strftime_now('%Y') }}{{ (messages|groupby('role')|list)[0][0] }}{{ 7 // 2 * 3 - 1 }}{{ {'k': [1, 2.5, none, true]}|tojson }}"""

TEMPLATES = {"llama": LLAMA_LIKE, "qwen": QWEN_LIKE, "mistral": MISTRAL_LIKE}
NAMED = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|im_end|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [CHAT, WITH_CALLS], ids=["plain", "calls"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", ""])
def test_equals_transformers(name: str, messages: Any, tools: Any, prompt: bool, theirs: Any) -> None:
    expected = theirs.apply_chat_template(
        messages,
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        tokenize=False,
        enable_thinking=False,
    )
    template = ChatTemplate(TEMPLATES[name], NAMED)
    rendered = template.render(messages, tools=tools, add_generation_prompt=prompt, enable_thinking=False)
    assert rendered == expected
    assert len(rendered) > 40


def test_default_model_equals_transformers(default_text: TextModel, theirs: Any) -> None:
    for messages in (CHAT, CHAT[1:], CHAT[1:2]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert default_text.render_chat(messages, add_generation_prompt=prompt) == expected
            ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False)
            assert default_text.encode_chat(messages, add_generation_prompt=prompt) == ids
    assert default_text.notes == []


# Attacks

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ self.__init__ }}{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__['os'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__}'.format_map({'a': 1}) }}",
    "{% for x in [1] %}{{ loop._iterator.gi_frame }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends '/etc/passwd' %}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__['__globals__'] }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_there_is_no_way_out(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        rendered = ChatTemplate(source).render(messages)
    except InputError:
        pass
    else:
        assert rendered == ""  # an undefined value is as good as a refusal
    assert messages == [{"role": "user", "content": "x"}]


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}{{ ns.x|length }}"
BOMBS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop text": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "text kept back": "{% set y %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}{{ y|length }}",
    "macro tree": "{% macro a(n) %}{{ a(n - 1) }}{{ a(n - 1) }}{% endmacro %}{{ a(5) }}",
    "macro tree that ends": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(40) }}",
    "recursive loop": "{% for x in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "doubling ~": DOUBLING.replace("%s", "ns.x ~ ns.x"),
    "doubling +": DOUBLING.replace("%s", "ns.x + ns.x"),
    "doubling join": DOUBLING.replace("%s", "[ns.x, ns.x]|join"),
    "doubling method": DOUBLING.replace("%s", "''.join([ns.x, ns.x])"),
    "doubling format": DOUBLING.replace("%s", "'%s%s' % (ns.x, ns.x)"),
    "doubling lists": DOUBLING.replace("%s", "[ns.x, ns.x]"),
    "doubling tuples": DOUBLING.replace("%s", "(ns.x, ns.x)"),
    "doubling dicts": DOUBLING.replace("%s", "{'a': ns.x, 'b': ns.x}"),
    "doubling dict calls": DOUBLING.replace("%s", "dict(a=ns.x, b=ns.x)"),
    "doubling replace": DOUBLING.replace("%s", "ns.x.replace('a', 'aa')"),
    "doubling filter": DOUBLING.replace("%s", "ns.x|replace('a', 'aa')"),
    "doubling arguments": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs|tojson }}{% endif %}{% endmacro %}{{ m(60, 1) }}",
    "times": "{{ ('a' * 10**9)|length }}",
    "times list": "{{ ([1] * 10**9)|length }}",
    "times nested": "{% set x = ['a' * 1000000] * 7 %}{{ (x * 100000)|string|length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of round": "{{ 1.5|round(10**9, 'ceil') }}",
    "squaring": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "center method": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\\nb'|indent(10**9) }}",
    "tojson indent": "{{ [1]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "replace of nothing": "{{ ('a' * 8000000).replace('', 'b' * 8000000)|length }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "deep template": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for i in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "long number": "{{ " + "9" * 10000 + " }}",
    "comparisons": "{% set a = 'a' * 4000000 %}{% for i in range(99999) %}{% if a ~ i == a ~ 'b' %}{% endif %}{% endfor %}",
    "searches": "{% set a = 'ab' * 4000000 %}{% for i in range(99999) %}{% if 'ba' * 1000000 ~ 'c' in a %}{% endif %}{% endfor %}",
    "slices": "{% set a = 'a' * 8000000 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
}  # fmt: skip


REASONS = "too large|more than|too big|at most|is unsafe|not offered|recursion|No filter|undefined|nested blocks|digits"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", BOMBS)
def test_everything_has_an_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.sandbox.MAX_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(InputError, match=REASONS):
        ChatTemplate(BOMBS[name]).render(CHAT)
    assert time.monotonic() - start < 10  # far below "never", far above a busy machine's noise


GROWTH = {
    "indentation": "{{ tools|tojson(indent=4) }}",
    "separators": "{{ range(20)|list|tojson(separators=('x' * 8000000, ':')) }}",
    "numbers": "{{ ([2**2000] * 100000)|tojson }}",
}


@pytest.mark.parametrize("name", GROWTH)
def test_json_too_large_is_never_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.sandbox.MAX_SECONDS", 60.0)  # so that size is what ends it, on any machine
    deep: Any = [1] * 300_000
    for _ in range(55):
        deep = [deep]
    tools = [{"parameters": deep}]
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="too large"):
            ChatTemplate(GROWTH[name]).render(CHAT, tools=tools)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20  # the whole text would take 60 million characters or more


def test_namespaces_do_not_spell_themselves_out() -> None:
    """They may hold each other many times over, so writing one must not write its contents."""
    growing = (
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
    )
    assert ChatTemplate(growing + "{{ ns.x ~ [ns.x] }}").render(CHAT) == "<Namespace>[<Namespace>]"


def test_bounds_leave_room_for_real_conversations() -> None:
    long = [{"role": ("user", "assistant")[i % 2], "content": "word " * 600} for i in range(1000)]  # 3 MB
    assert len(ChatTemplate(QWEN_LIKE, NAMED).render(long)) > 3_000_000


def test_templates_that_refuse_say_why() -> None:
    with pytest.raises(InputError, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL_LIKE, NAMED).render([CHAT[1], CHAT[1]], strict=True)
    assert caught.value.param == "messages"
    with pytest.raises(InputError, match="cannot be read"):
        ChatTemplate("{% if %}").render(CHAT)
    with pytest.raises(InputError, match="more than"):
        ChatTemplate("x" * (MAX_TEMPLATE + 1)).render(CHAT)
    with pytest.raises(InputError, match="empty"):
        ChatTemplate("x").render([])


@pytest.mark.parametrize("value", [object(), {1: 2}, b"x", {"a"}, lambda: 1])
def test_only_plain_values_get_in(value: Any) -> None:
    with pytest.raises(InputError):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": value}])
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InputError, match="levels deep"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


# Which template a model has


def directory(path: Path, **config: Any) -> TextModel:
    (path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return TextModel.load(at_path(path))


def test_templates_of_a_directory(tmp_path: Path) -> None:
    one = [{"role": "user", "content": "hi"}]
    assert directory(tmp_path, chat_template="A{{ messages[0].content }}").render_chat(one) == "Ahi"
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    text = directory(tmp_path, chat_template=several)
    assert (text.render_chat(one), text.render_chat(one, tools=TOOLS)) == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("J")
    assert directory(tmp_path, chat_template=several).render_chat(one) == "J"


def test_a_model_without_template_says_what_it_assumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = directory(tmp_path)
    assert text.render_chat(CHAT[:1]) == "System: Be brief.\n\nAssistant:"
    assert any("no chat template" in note for note in text.notes)
    assert "no chat template" in caplog.text
    backend = Backend(models.BPE())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    chatml = TextModel(Tokenizer(backend, ["<|im_start|>", "<|im_end|>"]), {}, "m")
    assert chatml.render_chat(CHAT[:1]) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    assert "ChatML" in chatml.notes[0]


def test_bos_is_not_doubled(default_text: TextModel) -> None:
    tokenizer = default_text.tokenizer
    text = TextModel(tokenizer, {"default": "{{ bos_token }}{{ messages[0].content }}"})
    assert text.encode_chat([{"role": "user", "content": "hi"}]).count(tokenizer.bos_id) == 1


def test_variables_may_have_any_name():
    template = ChatTemplate("{{ self_ }}{{ text }}{{ how }}{{ messages|length }}")
    assert template.render(CHAT, **{"self": 1, "self_": "a", "text": "b", "how": "c"}) == "abc4"
