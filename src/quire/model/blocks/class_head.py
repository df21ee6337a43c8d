"""A classification head: scores of classes from the hidden state of one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.model.blocks.attention import LinearMaker
from quire.model.blocks.linear import Linear, Module
from quire.model.decoder_spec import ClassHead, DecoderSpec


@dataclass
class ClassHeadBlock:
    spec: ClassHead
    dense: Linear | None
    out: Linear

    @classmethod
    def build(cls, spec: DecoderSpec, linear: LinearMaker) -> ClassHeadBlock | None:
        head = spec.class_head
        if head is None:
            return None
        dense = linear(spec.hidden, (spec.hidden,), True) if head.dense else None
        return cls(head, dense, linear(spec.hidden, (head.labels,), head.bias))

    def modules(self) -> dict[str, Module | None]:
        return {"class_dense": self.dense, "class_out": self.out}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of a row's tokens [tokens, hidden] → scores, float32 [labels]"""
        one = hidden[:1] if self.spec.pooled == "cls" else hidden[-1:]
        return self.out(one if self.dense is None else self.dense(one).tanh())[0].float()
