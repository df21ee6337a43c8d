"""Options of a server, declared once like those of an engine; flags, keyword arguments and docs derive from these."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.types.errors import ConfigError
from quire.types.logs import FORMATS, LEVELS
from quire.types.models_file import ModelPoolOptions
from quire.types.option_checks import option, parse_size
from quire.types.replica_options import ReplicaOptions


@dataclass(frozen=True)
class ServeOptions(ModelPoolOptions, ReplicaOptions):
    """Serving."""

    host: str = option("127.0.0.1", "address of the API; any but loopback needs keys", common=True)
    port: int = option(8000, "port of the API; 0 picks a free one", low=0, high=65535, common=True)
    admin_host: str = option("127.0.0.1", "address of the admin API")
    admin_port: int | None = option(
        None, "port of the admin API (default: the API's port + 1, or any if that is 0)", low=0, high=65535
    )
    files: str | None = option(
        None, "folder of files, batches and stored responses (default: they go with the server)", common=True
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls: auto (by its chat template), or a format by vLLM's name, as hermes",
        alias="--tool-parser",
        common=True,
    )
    reasoning_parser: str = option(
        "auto",
        "how it marks thoughts: auto (by its chat template), none, or a format by vLLM's name, as deepseek_r1",
        common=True,
    )
    strict_fields: bool = option(False, "refuse request fields that are not known, rather than ignore and name them")
    model_management: bool = option(
        False, "let Ollama's /api/pull, copy and delete change the cache of models; with keys, those of scope admin"
    )
    served_model_name: str | None = option(None, "name clients use (default: the model's own)", common=True)

    api_keys: str | None = option(
        None, "TOML file of API keys (see `quire keys`); or set QUIRE_API_KEY in the env", common=True
    )
    allow_open: bool = option(False, "listen without keys on an address that others can reach")
    cors: str | None = option(
        None, "origins whose pages may call the API, separated by commas; * for any (needs keys)", common=True
    )
    cache_salt: bool = option(True, "with keys: share cached prefixes only among requests of one key")

    max_queue: int | None = option(
        None,
        "requests that may wait for their first token (default: 512 more than run at once); others are refused",
        low=1,
    )
    max_queue_tokens: int | None = option(
        None, "tokens they may be worth together (default: 4 times the KV pool)", low=1
    )
    max_queue_wait: float = option(
        30.0, "refuse when the expected wait for a first token is longer, in seconds", above=0
    )
    key_concurrency: int = option(0, "requests of one key at once; 0: no limit (a key's own entry overrides it)", low=0)
    key_tokens_per_minute: int = option(
        0, "tokens of one key a minute; 0: no limit (a key's own entry overrides it)", low=0
    )
    deadline_ms: int = option(0, "cancel requests not finished after so many milliseconds; 0: never", low=0)
    max_body: str = option("16M", "largest request body", size=True)
    max_header: str = option("64K", "largest request line and headers together", size=True)
    max_connections: int = option(4096, "open connections per port", low=1)
    api_workers: int = option(
        1, "processes that answer the API's port, over one engine: more than one where streams keep one busy", low=1
    )
    prepare_workers: int = option(2, "threads that render templates and tokenise", low=1)
    prepare_seconds: float = option(10.0, "longest time one request may take to render and tokenise", above=0)

    log_format: str = option("text", "lines of the log: text or json", forms=FORMATS)
    log_level: str = option(
        "info", "least important lines to log: debug, info, warning or error", forms=LEVELS, common=True
    )
    otlp_endpoint: str | None = option(
        None,
        "send OpenTelemetry spans to this OTLP/HTTP URL; needs quire[otel]",
        forms=("http://ADDRESS", "https://ADDRESS"),
    )
    ssl_certfile: str | None = option(
        None, "PEM file of a certificate and those above it: both ports then speak HTTPS; needs --ssl-keyfile"
    )
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's private key")
    grpc_port: int | None = option(
        None, "also serve gRPC on this port, 0 for any free one; needs quire[grpc]", low=0, high=65535
    )

    grpc_cert: str | None = option(None, "PEM file of a certificate: gRPC then speaks TLS; needs --grpc-key")
    grpc_key: str | None = option(None, "PEM file of the certificate's private key")

    grace: float = option(30.0, "seconds open requests have to finish after SIGTERM", low=0)
    heartbeat: float = option(5.0, "seconds without a sign of life after which the engine counts as not ready", low=1)
    hang_timeout: float = option(120.0, "seconds without a sign of life after which it is replaced; 0: never", low=0)
    max_restarts: int = option(3, "engine restarts within ten minutes before the server gives up", low=0)
    spare_engine: bool = option(
        True,
        "keep a process started ahead with everything imported, so that neither loads nor restarts of an engine wait "
        "for that; there is none where less than 2 GiB of memory are available",
    )
    hold_weights: str | None = option(
        None,
        "memory in which weights outlast their engine, such as 20G: one that restarts, or a model that returns, maps "
        "them instead of loading (Linux)",
        size=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.models is not None and self.replicas is not None:
            raise ConfigError("replicas is one model's: say it in the file of models, of those that are to have some")
        if self.models is not None and self.served_model_name is not None:
            raise ConfigError("served_model_name is one model's: leave it out beside models")
        if self.replicas is None and self.models is None and self.ray_address is not None:
            raise ConfigError("ray_address has no effect without replicas")
        if self.replicas is not None and not self.spare_engine:
            raise ConfigError("spare_engine has no effect with replicas: another takes over from one that died")
        if self.replicas is not None and self.hold_weights is not None:
            raise ConfigError("hold_weights has no effect with replicas: Ray starts them, and their weights are theirs")
        for cert, key in (("grpc_cert", "grpc_key"), ("ssl_certfile", "ssl_keyfile")):
            if (getattr(self, cert) is None) != (getattr(self, key) is None):
                raise ConfigError(f"{cert} and {key} need each other")
        if self.grpc_cert is not None and self.grpc_port is None:
            raise ConfigError("grpc_cert and grpc_key have no effect without grpc_port")
        if self.api_workers > 1 and (self.models is not None or self.replicas is not None):
            other = "models" if self.models is not None else "replicas"
            raise ConfigError(f"api_workers share one engine, and {other} means several: leave one of the two out")
        if 0 < self.hang_timeout < self.heartbeat:
            raise ConfigError("hang_timeout must not be shorter than heartbeat")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s*?#@]+", origin):
                raise ConfigError(f"cors takes origins like https://example.org, or *, got {origin!r}")

    @property
    def origins(self) -> list[str]:
        return [origin.strip() for origin in self.cors.split(",")] if self.cors is not None else []

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body)

    @property
    def header_bytes(self) -> int:
        return parse_size(self.max_header)

    @property
    def admin_port_wanted(self) -> int:
        return (self.port and self.port + 1) if self.admin_port is None else self.admin_port


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
