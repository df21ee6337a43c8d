"""A mixture of experts as a layer's feed: a router, the experts' matrices stacked, and one that sees every token.

norm ─► router ─► top k ─► rows sorted by expert ─► up ─► activation ─► down ─► weighed, added up ─► post_norm
   └──► shared up ─► activation ─► down (times its gate) ────────────────────────────┘

Products are grouped: one call multiplies each run of rows with its expert's matrix, and none waits for the CPU to know
how long the runs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels.op_signatures import Ops
from quire.model.blocks.attention import LinearMaker, NormMaker
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.blocks.norms import Norm
from quire.model.decoder_spec import DecoderSpec, Experts, Norms, Router
from quire.model.quantization.dense_scheme import DenseScheme

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class ExpertNorms:
    """Where routed and shared experts, and the router, are normed apart."""

    router: Norm
    experts: Norm
    experts_post: Norm
    shared_post: Norm
    scales: Plain  # what an expert's weight is multiplied with

    @classmethod
    def build(cls, hidden: int, count: int, norms: Norms, norm: NormMaker) -> ExpertNorms:
        router, experts, experts_post, shared_post = (norm(hidden, norms) for _ in range(4))
        scales = Plain((count,), device=router.weight.device, dtype=torch.float32)
        return cls(router, experts, experts_post, shared_post, scales)

    def modules(self) -> dict[str, Module | None]:
        return {
            "router_norm": self.router,
            "experts_norm": self.experts,
            "experts_post_norm": self.experts_post,
            "shared_post_norm": self.shared_post,
            "router_scales": self.scales,
        }


@dataclass
class ExpertsBlock:
    spec: Experts
    norm: Norm | None
    router: Linear
    correction: Plain | None
    up: Linear  # gate and up of the first expert, of the second ...
    down: Linear
    shared_up: Linear | None
    shared_down: Linear | None
    shared_gate: Linear | None
    post_norm: Norm | None
    norms: ExpertNorms | None

    @property
    def adds_up(self) -> bool:
        """Over ranks, by itself: what it norms is whole."""
        return self.norms is not None

    @classmethod
    def build(cls, spec: DecoderSpec, index: int, linear: LinearMaker, norm: NormMaker) -> ExpertsBlock:
        layer, hidden = spec.layers[index], spec.hidden
        feed, norms = layer.feed, layer.norms
        assert isinstance(feed, Experts)
        router = linear(hidden, (feed.count,), feed.router.bias)
        weight = router.state["weight"]
        correction = Plain((feed.count,), device=weight.device, dtype=torch.float32)
        return cls(
            spec=feed,
            norm=norm(hidden, norms) if norms.before and layer.parallel != "one_norm" else None,
            router=router,
            correction=correction if feed.router.correction else None,
            up=linear(hidden, (feed.intermediate,) * (2 if feed.gated else 1) * feed.matrices, feed.bias),
            down=linear(feed.intermediate, (hidden,) * feed.matrices, feed.bias),
            shared_up=linear(hidden, (feed.shared,) * (2 if feed.gated else 1), False) if feed.shared else None,
            shared_down=linear(feed.shared, (hidden,), False) if feed.shared else None,
            shared_gate=linear(hidden, (1,), False) if feed.shared_gate else None,
            post_norm=norm(hidden, norms) if norms.after else None,
            norms=ExpertNorms.build(hidden, feed.count, norms, norm) if feed.own_norms else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {
            "feed_norm": self.norm,
            "router": self.router,
            "router_correction": self.correction,
            "experts_up": self.up,
            "experts_down": self.down,
            "shared_up": self.shared_up,
            "shared_down": self.shared_down,
            "shared_gate": self.shared_gate,
            "feed_post_norm": self.post_norm,
            **(self.norms.modules() if self.norms is not None else {}),
        }

    def fused(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """`forward` by Triton kernels: no sorting, and the gate within the product."""
        from quire.kernels.triton import expert_kernels as kernels

        spec, router = self.spec, self.spec.router
        correction = None if self.correction is None else self.correction.weight
        if router.groups > 1:
            chosen, weights = choose_experts(self.router(x), spec, correction)
            chosen = chosen.int()
        else:
            chosen, weights = kernels.choose_experts(
                self.router(x),
                spec.top_k,
                sigmoid=router.score == "sigmoid",
                normalised=router.normalised,
                scale=router.scale,
                correction=correction,
            )
        rows, chosen = self._weighed(x, chosen, weights)
        total = chosen.numel()
        lists = kernels.list_rows(chosen, spec.count, kernels.block_rows(total, spec.count))
        up = kernels.expert_matmul(rows, self._matrices(self.up), lists, total, gate=spec.activation, bias=self.up.bias)
        down = kernels.expert_matmul(
            up, self._matrices(self.down), lists, total, bias=self.down.bias,
            scale=None if router.weighs_input else weights.view(-1),
        )  # fmt: skip
        mixed = down.unflatten(0, weights.shape).sum(1)
        return mixed if self.shared_up is None else mixed.add_(self._shared(x, ops))

    def forward(self, x: torch.Tensor, ops: Ops, raw: torch.Tensor, reduce: Reduce | None = None) -> torch.Tensor:
        """[tokens, hidden] → the same; `raw`: as it was before the norm. `reduce` adds up over ranks what is normed
        here."""
        if (norms := self.norms) is not None:
            logits = self.router(_normed(norms.router, raw, ops)) * raw.shape[1] ** -0.5
            routed, shared = self._routed(_normed(norms.experts, raw, ops), logits, ops), self._shared(x, ops)
            if reduce is not None:
                routed, shared = reduce(routed), reduce(shared)
            return _normed(norms.experts_post, routed, ops) + _normed(norms.shared_post, shared, ops)
        mixed = self._routed(x, self.router(x), ops)
        return mixed if self.shared_up is None else mixed.add_(self._shared(x, ops))

    def _routed(self, x: torch.Tensor, logits: torch.Tensor, ops: Ops) -> torch.Tensor:
        chosen, weights = choose_experts(logits, self.spec, None if self.correction is None else self.correction.weight)
        if self.norms is not None:
            weights = weights * self.norms.scales.weight[chosen]
        inputs, chosen = self._weighed(x, chosen, weights)
        sorted_experts, order = self._sorted(chosen.flatten())
        count = self.spec.matrices
        ends = torch.searchsorted(sorted_experts, torch.arange(count, device=x.device), right=True)
        rows = inputs[order.div(chosen.shape[1], rounding_mode="floor")]
        back = x.new_zeros(chosen.numel(), x.shape[1])  # what other ranks' experts say stays nothing
        if len(order):
            up = _grouped(self.up, rows, sorted_experts, ends, count)
            back[order] = _grouped(self.down, self._activated(up, ops), sorted_experts, ends, count)
        parts = back.unflatten(0, weights.shape)
        return (parts if self.spec.router.weighs_input else parts * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _sorted(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices of experts that are here, by expert, and which choices those are."""
        if (held := self.spec.held) is None:
            return chosen.sort(stable=True)
        here = ((chosen >= held.start) & (chosen < held.stop)).nonzero().squeeze(1)
        experts, order = (chosen[here] - held.start).sort(stable=True)
        return experts, here[order]

    def _weighed(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts' inputs and what each goes to: tokens as they are, or, where inputs are weighed, one row a choice."""
        if not self.spec.router.weighs_input:
            return x, chosen
        return (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1), chosen.reshape(-1, 1)

    def _matrices(self, linear: Linear) -> torch.Tensor:
        return linear.state["weight"].unflatten(0, (self.spec.count, -1))

    def _activated(self, up: torch.Tensor, ops: Ops) -> torch.Tensor:
        activation = self.spec.activation
        if self.spec.gated:
            return ops.act_and_mul(up, activation)
        assert activation != "swiglu_oai"
        return ops.act(up, activation)

    def _shared(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        assert self.shared_up is not None and self.shared_down is not None
        out = self.shared_down(self._activated(self.shared_up(x), ops))
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()


def _normed(norm: Norm, x: torch.Tensor, ops: Ops) -> torch.Tensor:
    return ops.rms_norm(x, norm.weight, norm.eps)


def choose_experts(
    logits: torch.Tensor, spec: Experts, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tokens, experts] → which experts, and how much each counts, [tokens, top_k]."""
    router = spec.router
    scores = logits.float().softmax(-1) if router.score == "softmax" else logits.float().sigmoid()
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = _best_groups(choice, router)
    chosen = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * router.scale if router.scale != 1.0 else weights


def _best_groups(choice: torch.Tensor, router: Router) -> torch.Tensor:
    """With all groups but the best hidden."""
    grouped = choice.unflatten(1, (router.groups, -1))
    best = grouped.amax(-1) if router.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(router.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


def _grouped(linear: Linear, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Each row of x, sorted by expert, times its expert's matrix; the rows of expert e end before ends[e]."""
    assert isinstance(linear.scheme, DenseScheme)
    out = linear.scheme.apply_each(linear.state, x, ends, count)
    return out if linear.bias is None else out + linear.bias.unflatten(0, (count, -1))[experts]
