"""One decoder layer at a time, in float32, over the hidden states of a calibration text.

Refuses to know: what is made of what is seen, how weights are stored.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.model.blocks.linear import Linear
from quire.model.blocks.stages import Stages
from quire.model.calibration.observed_inputs import ObservedInputs, ObservingScheme
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

    def finish(self) -> None:
        self._model.finish()

    def observe(self, hidden: list[torch.Tensor], *, gram: bool) -> dict[int, ObservedInputs]:
        """What each matrix, by its id, sees of samples [tokens, hidden]."""
        device = self._model.device
        seen = {
            id(linear.state): ObservedInputs(linear.columns, device, gram=gram) for linear in self.matrices.values()
        }
        self._scheme.observer = lambda state, x: seen[id(state)].add(x)
        for sample in hidden:
            self.run(sample)
        self._scheme.observer = None
        return {id(linear): seen[id(linear.state)] for linear in self.matrices.values()}

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden] of one sample before the layer → behind it."""
        count = len(hidden)
        layout = self._model.spec.kv_layout(page_size=PAGE, dtype="float32")
        device = self._model.device
        pool = allocate_kv(layout, 1 + sum(-(-count // group.tokens_per_page) for group in layout.groups), device)
        (group,) = layout.groups
        pages = torch.arange(1, 1 + -(-count // group.tokens_per_page), dtype=torch.int32, device=device)
        slots = group.tokens_per_page + torch.arange(count, device=device)
        batch = Batch(
            positions=torch.arange(count, device=device),
            query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
            kv_len=torch.tensor([count], dtype=torch.int32, device=device),
            counts=[count],
            kv_lens=[count],
            groups=(GroupBatch(group.tokens_per_page, pages[None], slots),),
        )
        with torch.no_grad():
            return self._model.through_layers(hidden.clone(), batch, KVViews(pool, layout))
