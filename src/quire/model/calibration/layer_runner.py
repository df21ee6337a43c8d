"""One decoder layer at a time, in float32, over the hidden states of a calibration text.

Refuses to know: what is made of what is seen, how weights are stored.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.model.blocks.experts import ExpertsBlock
from quire.model.blocks.linear import Linear
from quire.model.blocks.stages import Stages
from quire.model.calibration.observed_inputs import ObservedInputs, Observer, ObservingScheme
from quire.model.decoder import Layer, Model
from quire.model.decoder_spec import DecoderSpec

PAGE = 16


class LayerRunner:
    """`layer` and its `modules`, unfilled, by the names that `Target` uses within a layer; `finish` once they are."""

    def __init__(self, spec: DecoderSpec, index: int, device: torch.device):
        alone = replace(spec, layers=(spec.layers[index],), vocab_size=1, tie_embeddings=True)
        self._scheme = ObservingScheme()
        self._model = Model(alone, device=device, dtype=torch.float32, scheme=self._scheme)
        self._model.stages = Stages(alone, device, plain=True)  # in which every product goes through the scheme
        self.layer: Layer = self._model.layers[0]
        found = self._model.modules()
        self.modules = {n.removeprefix("layers.0."): m for n, m in found.items() if n.startswith("layers.0.")}
        self.matrices = {name: module for name, module in self.modules.items() if isinstance(module, Linear)}
        for linear in self.matrices.values():  # experts, too
            linear.scheme = self._scheme

    def count(self, linear: Linear) -> int:
        """Matrices that see inputs of their own: experts."""
        feed = self.layer.feed
        experts = isinstance(feed, ExpertsBlock) and (linear is feed.up or linear is feed.down)
        return feed.spec.count if isinstance(feed, ExpertsBlock) and experts else 1

    def finish(self) -> None:
        self._model.finish()

    def observe(self, hidden: list[torch.Tensor], *, gram: bool) -> dict[int, list[ObservedInputs]]:
        """What each matrix, by its linear's id, sees of samples [tokens, hidden]."""
        device = self._model.device
        seen = {
            id(linear.state): [ObservedInputs(linear.columns, device, gram=gram) for _ in range(self.count(linear))]
            for linear in self.matrices.values()
        }
        for sample in hidden:
            self.run([sample], lambda state, index, x: seen[id(state)][index].add(x))
        return {id(linear): seen[id(linear.state)] for linear in self.matrices.values()}

    def run(self, hidden: list[torch.Tensor], observer: Observer | None = None) -> list[torch.Tensor]:
        """Hidden states [tokens, hidden] of samples before the layer → behind it. `observer` is shown what each matrix
        is to be multiplied with, of all samples at once, and may change the matrix."""
        counts, device = [len(sample) for sample in hidden], self._model.device
        layout = self._model.spec.kv_layout(page_size=PAGE, dtype="float32")
        (group,) = layout.groups
        size = group.tokens_per_page
        need = [-(-count // size) for count in counts]
        firsts = torch.tensor([1, *need], device=device).cumsum(0)[:-1]  # page of each sample
        positions = torch.cat([torch.arange(count, device=device) for count in counts])
        rows = torch.repeat_interleave(torch.tensor(counts, device=device))
        lengths = torch.tensor(counts, device=device)
        batch = Batch(
            positions=positions,
            query_start=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
            kv_len=lengths.int(),
            counts=counts,
            kv_lens=counts,
            groups=(
                GroupBatch(
                    size,
                    (firsts[:, None] + torch.arange(max(need), device=device)).clamp_(max=sum(need)).int(),
                    firsts[rows] * size + positions,
                ),
            ),
        )
        self._scheme.observer = observer
        with torch.no_grad():
            pool = allocate_kv(layout, 1 + sum(need), device)
            out = self._model.through_layers(torch.cat(hidden), batch, KVViews(pool, layout))
        self._scheme.observer = None
        return list(out.split(counts))
