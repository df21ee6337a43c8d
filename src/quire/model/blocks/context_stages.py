"""Stages of a context-parallel rank: attention is put together from parts, all else is done for its own tokens alone.

    K, V of the step     round the ring, while queries attend what is at hand; every rank keeps its share in its pages
    queries              to all ranks, where divided rows have keys before them in pages
    partial outputs      back to whoever asked; put together by their log-sum-exps, beside the sinks, once

After Liu et al. 2023 (ring attention) and Yang et al. 2024 (pass-KV and pass-Q). Refuses to know: what carries bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.context_split import ContextSplit
from quire.kernels.eager.context_plan import ContextPlan
from quire.kernels.eager.partial_attention import Partial, beside_sinks, merge, partial_attention
from quire.kernels.kv_views import LayerKV, decode, encode, put_tokens
from quire.model.blocks.stages import AttendingBlock, Stages, Step
from quire.model.decoder_spec import DecoderSpec
from quire.model.ranks import Ranks

CONTEXT_ATTENTION = "attention: partial, by torch's own operations, put together over context-parallel ranks"


class ContextStages(Stages):
    kv_kinds: tuple[str, ...] = ("int8", "fp8", "int4")

    def __init__(self, spec: DecoderSpec, device: torch.device, ranks: Ranks):
        super().__init__(spec, device, ranks=ranks.tensor)
        self._context = ranks
        self._read_again = {mixer.kv_from for mixer in spec.attending.values()}
        self.reasons = [CONTEXT_ATTENTION]

    def write_kv(self, block: AttendingBlock, k: torch.Tensor, v: torch.Tensor, step: Step) -> None:
        """Of divided rows kept for the ring, rounded as pages round; of others written."""
        kv, split = step.kv.layers[block.index], step.batch.context
        numbers, scales = kv.sides[0]
        both = torch.stack((k,) if kv.shared else (k, v), dim=1)  # [tokens, K and V, kv_heads, dim]
        if scales is not None or numbers.dtype != k.dtype:
            both = decode(*encode(both, numbers.dtype, scaled=scales is not None)).to(k.dtype)
        step.computed[block.index] = both[split.divided]
        if len(split.replicated):
            self._keep(both[split.replicated], split.tokens[split.replicated], kv, split)

    def _keep(self, both: torch.Tensor, tokens: torch.Tensor, kv: LayerKV, split: ContextSplit) -> None:
        """K and V of these tokens of the whole batch: this rank's share goes to its plan."""
        here, slots = split.own_slots(split.whole.groups[kv.group].kv_slots[tokens])
        put_tokens(kv, both[here, 0], both[here, -1], slots)

    def attention(self, block: AttendingBlock, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[tokens, heads, dim] of this rank's tokens."""
        spec, split = block.attention, step.batch.context
        kv = step.kv.layers[block.kept_by]
        if block.kind not in step.plans:
            step.plans[block.kind] = ContextPlan(split, split.whole.groups[kv.group], spec)
        plan = step.plans[block.kind]
        asked, received = self._send_queries(q, split, plan)
        found = Partial.nothing(spec, q)
        if split.rows:
            self._ring(block, q, found, kv, step)
        if plan.replicated or any(plan.asked):
            received()
            packed = plan.attend_pages(spec, torch.cat((q[split.replicated], *asked)), kv)
            found.add(torch.cat((split.replicated, plan.own)), self._collect(packed, plan))
        return beside_sinks(spec, found).to(q.dtype)

    def _send_queries(
        self, q: torch.Tensor, split: ContextSplit, plan: ContextPlan
    ) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """By rank, its queries of rows with keys before them; there once the function has been called."""
        if not any(plan.asked):
            return [], lambda: None
        mine, asked = q[plan.own].contiguous(), [q.new_empty(count, *q.shape[1:]) for count in plan.asked]
        asked[split.rank] = mine
        others = [rank for rank in range(split.size) if rank != split.rank]
        return asked, self._context.transfer(dict.fromkeys(others, mine), {rank: asked[rank] for rank in others})

    def _ring(self, block: AttendingBlock, q: torch.Tensor, found: Partial, kv: LayerKV, step: Step) -> None:
        """K and V of this step's divided rows: a rank's own, then those that the rank before hands on, each on its way
        to the next rank while it is attended."""
        spec, split, plan = block.attention, step.batch.context, step.plans[block.kind]
        rank, size = split.rank, split.size
        held = step.computed[block.kept_by]
        if block.kept_by not in self._read_again:
            del step.computed[block.kept_by]
        for hop in range(size):
            source, arrive = (rank - hop) % size, None
            if hop < size - 1:
                incoming = held.new_empty(len(split.keys[source - 1]), *held.shape[1:])
                arrive = self._context.transfer({(rank + 1) % size: held}, {(rank - 1) % size: incoming})
            if block.kept_by == block.index:
                self._keep(held, split.keys[source], kv, split)
            k, v = held[None, :, 0], held[None, :, -1, :, spec.values_from or 0 :]
            for (queries, keys, causal, _), seen in plan.ring[source]:
                part = partial_attention(spec, q[None, queries], k[:, keys], v[:, keys], seen, causal=causal)
                found.add(queries, Partial(part.out[0], part.lse[0]))
            if arrive is not None:
                arrive()
                held = incoming

    def _collect(self, packed: torch.Tensor, plan: ContextPlan) -> Partial:
        """What the pages of all ranks make of this rank's queries: those that every rank has, then its own."""
        rank, size = self._context.rank, self._context.size
        every, *of_rank = packed.split([plan.replicated, *plan.asked])
        parts = [torch.cat((every, some)) for some in of_rank]
        others = [other for other in range(size) if other != rank]
        received = {other: torch.empty_like(parts[rank]) for other in others}
        self._context.transfer({other: parts[other] for other in others}, received)()
        received[rank] = parts[rank]
        return merge([Partial.unpacked(received[each]) for each in range(size)])


def whole_step(hidden: torch.Tensor, split: ContextSplit, ranks: Ranks) -> torch.Tensor:
    """Hidden states of a rank's tokens → of all tokens of the step, in order, on every rank."""
    parts = [hidden.new_empty(len(tokens), hidden.shape[1]) for tokens in split.keys]
    parts[ranks.rank] = hidden[split.divided].contiguous()
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    ranks.transfer(dict.fromkeys(others, parts[ranks.rank]), {rank: parts[rank] for rank in others})()
    whole = hidden.new_empty(split.whole.tokens, hidden.shape[1])
    whole[split.tokens[split.replicated]] = hidden[split.replicated]
    for tokens, part in zip(split.keys, parts, strict=True):
        whole[tokens] = part
    return whole
