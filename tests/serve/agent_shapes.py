"""Requests as two coding agents send them, written from their public documentation: headers, system, tools, turns.

Shortened where only length differs. Refuses to know: who answers.
"""

from __future__ import annotations

import json
from typing import Any

EPHEMERAL = {"type": "ephemeral"}


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


# ---- Claude Code, over /v1/messages -------------------------------------------------------------------------

CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": (
        "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14,"
        "context-management-2025-06-27,prompt-caching-scope-2026-01-05,advanced-tool-use-2025-11-20,effort-2025-11-24"
    ),
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.280 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "authorization": "Bearer none",
}

CLAUDE_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.280; cc_entrypoint=cli;"},
    {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
    {"type": "text", "text": "Use the tools.", "cache_control": {**EPHEMERAL, "ttl": "1h", "scope": "global"}},
]

CLAUDE_TOOLS: list[dict[str, Any]] = [
    {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": _schema(
            ["command"],
            command=_text("The command to run", maxLength=24),
            timeout={"type": "number", "description": "Milliseconds, at most 600000"},
            run_in_background={"type": "boolean"},
        ),
        "eager_input_streaming": True,
    },
    {
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": _schema(
            ["file_path"],
            file_path=_text("The absolute path", maxLength=24),
            offset={"type": "integer", "minimum": 0, "maximum": 9007199254740991},
            limit={"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        ),
        "input_examples": [{"file_path": "/src/app.py"}],
    },
    {
        "name": "TodoWrite",
        "description": "Writes a list of tasks.",
        "input_schema": _schema(
            ["todos"],
            todos={
                "type": "array",
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "content": {"type": "string", "minLength": 1, "maxLength": 16},
                        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    },
                    "required": ["content", "status"],
                    "additionalProperties": False,
                },
            },
        ),
    },
    {
        "name": "ToolSearch",
        "description": "Finds deferred tools.",
        "input_schema": _schema(["query"], query=_text("q")),
    },
    {
        "name": "mcp__docs__search",
        "description": "Searches the documentation.",
        "input_schema": {"type": "object", "properties": {"q": _text("what", maxLength=16)}},
        "defer_loading": True,
    },
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
]


def claude_body(model: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A turn of the main loop; the last block is marked for the cache, as every turn's is."""
    *before, last = messages
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(block) for block in content]
    blocks[-1] = {**blocks[-1], "cache_control": EPHEMERAL}
    return {
        "model": model,
        "messages": [*before, {**last, "content": blocks}],
        "system": CLAUDE_SYSTEM,
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
        **more,
    }


CLAUDE_BEGIN: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-16.\n</system-reminder>"},
            {"type": "text", "text": "Fix the failing test."},
        ],
    }
]


def claude_results(turn: int, answer: list[dict[str, Any]]) -> dict[str, Any]:
    """What the agent says to an answer: a result for each call, in every form it uses."""
    results: list[dict[str, Any]] = []
    for block in answer:
        if block["type"] == "tool_use":
            result: dict[str, Any] = {"type": "tool_result", "tool_use_id": block["id"], "content": f"result {turn}"}
            if turn % 4 == 1:
                result["content"] = [{"type": "text", "text": f"<tool_use_error>{turn}</tool_use_error>"}]
                result["is_error"] = True
            if block["name"] == "ToolSearch":
                result["content"] = [{"type": "tool_reference", "tool_name": "mcp__docs__search"}]
            results.append(result)
    if turn % 5 == 2 or not results:
        results.append({"type": "text", "text": "<system-reminder>The task list is empty.</system-reminder>"})
    return {"role": "user", "content": results}


# ---- Codex, over /v1/responses ------------------------------------------------------------------------------

CODEX_HEADERS = {
    "authorization": "Bearer none",
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.130.0 (Debian; x86_64)",
    "conversation_id": "0199a213-81ba-7a40-9d5a-5f1f9d1a9a11",
    "session_id": "0199a213-81ba-7a40-9d5a-5f1f9d1a9a11",
    "openai-beta": "responses=experimental",
}

_PATCH = """start: begin hunk end
begin: "*** Begin Patch" LF
hunk: "*** Delete File: " NAME LF
end: "*** End Patch"
NAME: /[a-z]{1,8}/
LF: "\\n"
"""

CODEX_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
                "workdir": {"type": "string", "maxLength": 8},
                "timeout_ms": {"type": "number"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {
        "type": "function",
        "name": "update_plan",
        "description": "Updates the plan.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "explanation": {"type": "string", "maxLength": 8},
                "plan": {
                    "type": "array",
                    "maxItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "step": {"type": "string", "maxLength": 8},
                            "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                        },
                        "required": ["step", "status"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["plan"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. Not JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH},
    },
    {"type": "web_search", "external_web_access": False},
]


def codex_message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX_BEGIN: list[dict[str, Any]] = [
    codex_message("developer", "<permissions instructions>Ask before writing.</permissions instructions>"),
    codex_message("user", "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"),
    codex_message("user", "Fix the failing test."),
]


def codex_body(model: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "instructions": "You are Codex.",
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81ba-7a40-9d5a-5f1f9d1a9a11",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "i"},
        **more,
    }


def codex_history(turn: int, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the agent keeps of an answer, as it writes it, and the results it adds."""
    kept: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for item in output:
        kind = item["type"]
        if kind == "reasoning":
            kept.append({name: item.get(name) for name in ("type", "summary", "content", "encrypted_content")})
        elif kind == "message":
            kept.append(codex_message("assistant", "".join(part["text"] for part in item["content"])))
        elif kind == "function_call":
            kept.append({name: item[name] for name in ("type", "name", "arguments", "call_id")})
            said: Any = json.dumps({"output": f"result {turn}", "metadata": {"exit_code": 0}})
            said = [{"type": "input_text", "text": said}] if turn % 3 == 2 else said
            results.append({"type": "function_call_output", "call_id": item["call_id"], "output": said})
        elif kind == "custom_tool_call":
            kept.append({name: item[name] for name in ("type", "name", "input", "call_id")})
            results.append({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."})
    return kept + (results or [codex_message("user", "Go on.")])
