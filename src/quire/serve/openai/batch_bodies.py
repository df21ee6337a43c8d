"""What /v1/batches takes and answers, and how a batch is remembered.

Refuses to know: how it is worked off.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# As OpenAI bounds it: 16 pairs, names of 64 characters, values of 512.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class OutputExpiry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When the files that a batch writes are removed."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2592000)]


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchProblem(msgspec.Struct):
    code: str | None
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @property
    def over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def ended(self) -> int:
        """When; 0 while it is not over."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at or 0


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchDeleted(msgspec.Struct):
    id: str
    object: Literal["batch"] = "batch"
    deleted: bool = True


class OwnedBatch(msgspec.Struct):
    """A batch as it is remembered: whose it is, and the files that its answers and failures go to, once begun."""

    batch: Batch
    owner: str
    outputs: dict[str, str] = {}
    expiry: int | None = None  # seconds that these files are kept
