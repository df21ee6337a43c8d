"""Log-probabilities under the model itself: from raw logits, before any sampling parameter.

Refuses to know: slots, how a token was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from quire.generation.sampling.top_k import top_k_tokens
from quire.kernels.triton import why_not
from quire.types.plan import TokenLogprobs


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of m positions, on the device until `to_host`."""

    tokens: torch.Tensor  # int64 [m]
    logprobs: torch.Tensor  # float32 [m]
    ranks: torch.Tensor  # integers [m]; 1 for the most likely, equal for equals
    top_ids: torch.Tensor  # integers [m, k], most likely first
    top_logprobs: torch.Tensor  # float32 [m, k]
    tops: Sequence[int | None]  # per row of the batch: how many of the top are wanted; None: no log-probabilities
    packed: torch.Tensor | None = None  # that all of it but the tokens is in

    @classmethod
    def of(cls, tokens: torch.Tensor, packed: torch.Tensor, tops: Sequence[int | None]) -> LogprobTensors:
        """`packed` as a GPU's kernel makes it: int32 [m, 2 + 2 * k]"""
        k, real = packed.shape[1] // 2 - 1, packed.view(torch.float32)
        return cls(tokens, real[:, 0], packed[:, 1], packed[:, 2 : 2 + k], real[:, 2 + k :], tops, packed)

    def start_copy(self) -> LogprobTensors:
        """Begin the copy to the host and do not wait; read the result with `to_host` after the device got there."""
        if self.packed is not None:
            return LogprobTensors.of(begin_copy(self.tokens), begin_copy(self.packed), self.tops)
        tokens, logprobs, ranks, top_ids, top_logprobs = map(begin_copy, self._tensors())
        return LogprobTensors(tokens, logprobs, ranks, top_ids, top_logprobs, self.tops)

    def to_host(self) -> list[TokenLogprobs | None]:
        """One entry per row of the batch."""
        most = max((top for top in self.tops if top is not None), default=0)
        tokens, logprobs, ranks, top_ids, top_logprobs = self._tensors()
        columns = tokens, logprobs, ranks, top_ids[:, :most], top_logprobs[:, :most]
        rows = map(TokenLogprobs, *(column.tolist() for column in columns))
        if self.tops.count(most) == len(self.tops):
            return list(rows)
        return [None if top is None else _of_top(next(rows), top) for top in self.tops]

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.logprobs, self.ranks, self.top_ids, self.top_logprobs


def score_rows(logits: torch.Tensor, targets: torch.Tensor, tops: Sequence[int | None]) -> LogprobTensors:
    """Log-probabilities of given tokens and of the most likely, for those rows of a batch that have a top: logits and
    targets are of these, tops of all. [m, vocab], int64 [m]"""
    width = min(max((top for top in tops if top is not None), default=0), logits.shape[-1])
    if why_not(logits.device) is None:
        from quire.kernels.triton.logprob_kernels import logprobs

        return LogprobTensors.of(targets, logprobs(logits, targets, width), tops)
    chosen = logits.gather(-1, targets.unsqueeze(-1))  # [m, 1]
    top_logits, top_ids = top_k_tokens(logits, width) if width else (chosen[:, :0], targets[:, None][:, :0])
    best, mass, ranks = _measured(logits, chosen)
    return LogprobTensors(
        tokens=targets,
        logprobs=((chosen - best) - mass).squeeze(-1),
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=(top_logits - best) - mass,
        tops=tops,
    )


def _measured(logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row its largest logit, the logarithm of its mass against that, and the rank of the chosen logit.
    [m, vocab], [m, 1] → [m, 1], [m, 1], int64 [m]"""
    if logits.is_cuda:
        best = logits.amax(-1, keepdim=True)
        return best, (logits - best).exp_().sum(-1, keepdim=True).log_(), (logits > chosen).sum(-1) + 1
    # torch counts truths one by one, and writes each step of a softmax to memory: numpy does not, row by row
    found = np.empty((3, len(logits)), np.float64)
    with np.errstate(all="ignore"):  # where nothing is possible, nothing is likely
        for column, row, one in zip(found.T, logits.numpy(), chosen.squeeze(-1).tolist(), strict=True):
            top = row.max()
            relative = row - top
            column[:] = top, np.log(np.exp(relative, out=relative).sum()), np.count_nonzero(row > one) + 1
    best, mass = torch.from_numpy(found[:2]).float().unsqueeze(-1)
    return best, mass, torch.from_numpy(found[2]).long()


def join(parts: Sequence[tuple[LogprobTensors | None, int]]) -> LogprobTensors | None:
    """Of parts of a batch, so many rows each, as of the batch; None where no row wants any."""
    some = [part for part, _ in parts if part is not None]
    if not some:
        return None
    width = max(part.top_ids.shape[-1] for part in some)
    return LogprobTensors(
        tokens=torch.cat([part.tokens for part in some]),
        logprobs=torch.cat([part.logprobs for part in some]),
        ranks=torch.cat([part.ranks for part in some]),
        top_ids=torch.cat([F.pad(part.top_ids, (0, width - part.top_ids.shape[-1])) for part in some]),
        top_logprobs=torch.cat([F.pad(part.top_logprobs, (0, width - part.top_ids.shape[-1])) for part in some]),
        tops=[top for part, count in parts for top in (part.tops if part is not None else [None] * count)],
    )


def _of_top(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    del entry.top_ids[top:], entry.top_logprobs[top:]
    return entry


def begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """To the host without waiting: pinned memory, valid once the device got there."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
