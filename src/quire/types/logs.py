"""Logs as lines of text or of JSON, the same in every process: a child process inherits the choice.

Refuses to know: what is logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_INHERITED = "QUIRE_LOG"  # format:level, for processes started by this one
model_of_task: ContextVar[str] = ContextVar("quire-model", default="")  # that the current task is about, of several


def configure(format: str = "text", level: str = "info", *, request_id: Callable[[], str] | None = None) -> None:
    """Send all logs to standard error. `request_id` tells on whose behalf the current task works."""
    os.environ[_INHERITED] = f"{format}:{level}"
    _install(format, level, "api", request_id)


def configure_child(process: str, *, request_id: Callable[[], str] | None = None, **fields: str) -> None:
    """As the parent process was told; each line has the `fields` that are not empty."""
    format, _, level = os.environ.get(_INHERITED, "text:info").partition(":")
    _install(format, level, process, request_id, {name: value for name, value in fields.items() if value})


def _install(
    format: str,
    level: str,
    process: str,
    request_id: Callable[[], str] | None,
    fields: Mapping[str, str] = MappingProxyType({}),
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonLines if format == "json" else TextLines)(process, request_id, fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _Lines(logging.Formatter):
    def __init__(
        self,
        process: str,
        request_id: Callable[[], str] | None = None,
        fields: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__()
        self._process = process
        self._request_id = request_id
        self._fields = fields

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """What the record carries beside its message, the request's id above all."""
        found: dict[str, Any] = dict(self._fields)
        if self._request_id is not None and (id := self._request_id()):
            found["request_id"] = id
        if model := model_of_task.get():
            found["model"] = model
        return found | getattr(record, "fields", {})


class JsonLines(_Lines):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in self.fields(record).items())
        text = f"{stamp} {self._process} {record.levelname} {record.getMessage()}{fields}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
