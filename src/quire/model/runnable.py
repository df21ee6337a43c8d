"""What the worker sees of a model, whatever runs it: plain torch, fused GPU stages, the compiled CPU program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from quire.kernels.attention_backend import Batch
from quire.kernels.cpu import NativeSampling
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.model.blocks.class_head import ClassHeadBlock
from quire.model.blocks.low_rank import Updates
from quire.model.decoder_spec import DecoderSpec
from quire.types.kv import KVLayout


class Sketch(Protocol):
    """A model with a few of its layers, for compiling and rehearsing: launches all that the whole one does."""

    def forward(
        self,
        input_ids: torch.Tensor,
        batch: Batch,
        kv: KVViews,
        *,
        last: bool = False,
        tap: HiddenStateTap | None = None,
    ) -> torch.Tensor: ...

    def attention(self, batch: Batch, kv: KVViews) -> None:
        """Only attention, by queries of zeros."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Runnable(Protocol):
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype  # of hidden states
    length: int  # the longest context it was made for
    class_head: ClassHeadBlock | None  # scores of classes, of a row's hidden states

    @property
    def kv_dtype(self) -> str:
        """What K and V are kept in unless others are asked for."""
        ...

    @property
    def kv_kinds(self) -> tuple[str, ...]:
        """The kinds of pages it can run on."""
        ...

    @property
    def threads(self) -> int | None:
        """How many of its own it computes on; None: torch's."""
        ...

    @property
    def sampling(self) -> NativeSampling | None:
        """Draws tokens on those threads."""
        ...

    @property
    def adapter_slots(self) -> int:
        """LoRA adapters it has room for."""
        ...

    @property
    def updated(self) -> int:
        """Matrices that any of them had updates of; captured steps leave out what came later."""
        ...

    @property
    def inverse_frequencies(self) -> list[torch.Tensor] | None:
        """By which keys are rotated, [rotary / 2] each, by layer; None: positions are learned."""
        ...

    def describe(self) -> list[str]:
        """What was chosen to run it and why, for people."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        batch: Batch,
        kv: KVViews,
        *,
        last: bool = False,
        tap: HiddenStateTap | None = None,
    ) -> torch.Tensor:
        """Token ids [tokens] → hidden states after the final norm [tokens, hidden]; K and V go to their pages.
        `last`: of each row's last token only, [rows, hidden]."""
        ...

    def shallow(self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, layer: int) -> None:
        """Only K and V of the first layers, up to those of `layer`, go to their pages."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → logits [rows, vocabulary]."""
        ...

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of token ids [...], as its table has them: [..., hidden]"""
        ...

    def sketch(self) -> Sketch | None:
        """None: nothing of it is compiled while it runs."""
        ...

    def prefix_heads(self, layout: KVLayout) -> int | None:
        """Query heads of a KV head, where rows with a common prefix are attended together over it; else None."""
        ...

    def prepared_lengths(self, longest: int) -> list[int]:
        """Lengths of prompts that attention prepares for when it first meets them, which takes long."""
        ...

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """Queries times factors [layers, kv_heads, head_dim], keys by them: what and why, `key_channel_scales` says."""
        ...

    def reserve_adapters(self, slots: int, rank: int) -> None:
        """Room for LoRA adapters of up to this rank, in slots 1 .. slots."""
        ...

    def set_adapter(self, slot: int, updates: Updates) -> None:
        """Tokens of this slot (`Batch.adapters`) run with these updates from now on; with none, as the base."""
        ...

    def forget_pages(self) -> None:
        """The KV pages of the steps before are given up."""
        ...

    def weights(self) -> Iterable[torch.Tensor]:
        """What a sleeping engine moves out of the device's memory; a tensor may come twice."""
        ...
