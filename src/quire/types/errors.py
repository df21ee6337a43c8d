"""Every error a user can meet, in one tree.

    QuireError
    ├── InputError            the caller's request is wrong (HTTP 400); names the field and the fix
    │   └── ContextLengthError    prompt does not fit the context
    ├── ModelNotFoundError    no such model anywhere we may look (HTTP 404)
    ├── RequestNotFoundError  no such request of the asker, or not remembered any more (HTTP 404)
    ├── ReplicaNotFoundError  no such replica of this server (HTTP 404)
    ├── ModelFileError        a model file is truncated, lying, or of a kind we do not read
    ├── ConfigError           options that contradict each other or the hardware
    │   └── NotInstalledError     a package that this takes is missing or too old (HTTP 501)
    ├── UnauthorizedError     no key, or not one of ours (HTTP 401)
    ├── ForbiddenError        the key is ours but does not allow this (HTTP 403)
    ├── DeadlineError         the work was cancelled because its time was up (HTTP 408)
    ├── OverloadedError       a bounded queue is full; says when to retry (HTTP 503)
    │   └── RateLimitError        one key's limit, not the server's (HTTP 429)
    └── EngineDeadError       the engine stopped; everything open has ended (HTTP 503)

Messages say the cause first and the remedy after it.
"""

from __future__ import annotations


class QuireError(Exception):
    """Base of all errors raised on purpose."""

    status = 500
    code = "internal_error"


class InputError(QuireError):
    status = 400
    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        if code:
            self.code = code


class ContextLengthError(InputError):
    code = "context_length_exceeded"

    def __init__(self, message: str):
        super().__init__(message, param="prompt")


class ModelNotFoundError(QuireError):
    status = 404
    code = "model_not_found"


class RequestNotFoundError(QuireError):
    status = 404
    code = "request_not_found"


class ReplicaNotFoundError(QuireError):
    status = 404
    code = "replica_not_found"


class ModelFileError(QuireError):
    code = "bad_model_file"


class ConfigError(QuireError):
    code = "bad_config"


class NotInstalledError(ConfigError):
    status = 501
    code = "not_installed"


class UnauthorizedError(QuireError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(QuireError):
    status = 403
    code = "permission_denied"


class DeadlineError(QuireError):
    status = 408
    code = "deadline_exceeded"


class OverloadedError(QuireError):
    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(OverloadedError):
    status = 429
    code = "rate_limit_exceeded"


class EngineDeadError(QuireError):
    status = 503
    code = "engine_dead"
    retry_after = 5.0  # a restart takes a few seconds


def to_wire(error: QuireError) -> tuple[str, str]:
    """An error that is to cross a process boundary: (class name, or class name:param, message)."""
    param = getattr(error, "param", None)
    return f"{type(error).__name__}:{param}" if param else type(error).__name__, str(error)


def from_wire(kind: str, message: str) -> QuireError:
    """What `to_wire` told."""
    name, _, param = kind.partition(":")
    found = globals().get(name)
    if not (isinstance(found, type) and issubclass(found, QuireError)):
        return QuireError(message)
    error = found(message)
    if param and isinstance(error, InputError):
        error.param = param
    return error


def lacks_memory(error: RuntimeError) -> bool:
    """Whether a device had none left: torch's own error, Triton's as it loads a kernel, or cuBLAS's as it begins."""
    return any(words in str(error) for words in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))
