"""The compiled decoder as a model: same face as `Model`, whose weights it takes, packed, and one call per step.

Knows: which specs the program can run. Refuses to know: how it runs, files.
"""

from __future__ import annotations

import torch

from quire.kernels import cpu
from quire.kernels.attention_backend import Batch
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.model.blocks.class_head import ClassHeadBlock
from quire.model.blocks.latent import LatentBlock
from quire.model.blocks.low_rank import Update, Updates
from quire.model.compiled_weights import program_weights
from quire.model.decoder import Model
from quire.model.decoder_spec import Attention, DecoderSpec, Experts, Latent
from quire.model.recurrent_spec import GatedDelta, Mamba2, ShortConv
from quire.types.kv import KVLayout

MOST_TAPS = 16  # of csrc/kernels.h
MOST_KEY_DIM = 256


def refusal(spec: DecoderSpec, device: torch.device) -> str | None:
    """None if the compiled decoder can run such a model here, else the reason it cannot."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if reason := cpu.available():
        return reason
    if unknown := unknown_to_program(spec):
        return f"{spec.architecture} has {unknown}"
    return None


def unknown_to_program(spec: DecoderSpec) -> str | None:
    """The first thing of a spec that the program has no code for."""
    if spec.encoder:
        return "bidirectional attention"
    if spec.class_head is not None:
        return "a classification head"
    widths = {"hidden size": spec.hidden, "width of per-layer embeddings": spec.layer_input}
    for layer in spec.layers:
        match layer.mixer:
            case Attention(head_dim=dim):
                widths["head dimension"] = dim
            case Latent() as latent:
                widths |= {"latent rank": latent.kv_rank, "query rank": latent.q_rank or 0}
                widths |= {"rotated part": latent.rope_dim, "unrotated part": latent.nope_dim}
                widths |= {"value dimension": latent.value_dim}
            case GatedDelta(key_dim=dim) as delta:
                widths |= {"key dimension": dim, "value dimension": delta.value_dim}
                if dim > MOST_KEY_DIM:
                    return f"keys of more than {MOST_KEY_DIM} dimensions"
            case Mamba2() as mamba:
                widths |= {"state size": mamba.state_size, "normed part": mamba.inner // mamba.norm_groups}
            case ShortConv(width=width):
                widths["width of convolutions"] = width
        if isinstance(layer.mixer, GatedDelta | Mamba2 | ShortConv) and layer.mixer.taps > MOST_TAPS:
            return f"convolutions of more than {MOST_TAPS} inputs"
        if layer.feed is not None:
            widths["intermediate size"] = layer.feed.intermediate
            if isinstance(layer.feed, Experts):
                widths["intermediate size of shared experts"] = layer.feed.shared
        if odd := next((name for name, size in widths.items() if size % 32), None):
            return f"{odd} {widths[odd]}, no multiple of 32"
    return None


class CompiledModel:
    """Made by `load_model` once a model's weights are packed; ready when made."""

    kv_dtype = "float16"  # what K and V are best kept in
    kv_kinds = cpu.KV_KINDS
    dtype = torch.float32  # of hidden states and logits
    device = torch.device("cpu")
    class_head: ClassHeadBlock | None = None

    def __init__(self, model: Model, *, threads: int, isa: str | None = None, kept: str = ""):
        """`kept`: how weights are, for people."""
        self.spec = model.spec
        self.length = model.length
        self.threads = threads
        self.notes = model.notes
        self._model, self._kept = model, kept
        self._decoder = program_weights(model, isa)
        for layer in model.layers:
            if isinstance(layer.mixer, LatentBlock):  # packed head by head now
                layer.mixer.kv_up.state = {}
        self._program = cpu.NativeProgram(self._decoder, threads=threads, isa=isa)
        self.sampling = self._program.sampling()

    @property
    def inverse_frequencies(self) -> list[torch.Tensor] | None:
        return self._model.inverse_frequencies

    def describe(self) -> list[str]:
        """What was chosen to run it and why, for people."""
        return [f"decoder: compiled ({self._program.isa}), {self._kept}, {self.threads} threads", *self.notes]

    adapter_slots = 0
    updated = 0  # nothing is captured

    def reserve_adapters(self, slots: int, rank: int) -> None:
        """As `Model.reserve_adapters`; an adapter is packed to 8 bits, as weights are."""
        self.adapter_slots = slots
        self._program.reserve_adapters(slots, rank)

    def set_adapter(self, slot: int, updates: Updates) -> None:
        """As `Model.set_adapter`."""
        layers: list[dict[str, Update]] = [{} for _ in self.spec.layers]
        for index, found in enumerate(layers):
            for module, names in self._adaptable(index).items():
                parts = updates.get(f"layers.{index}.{module}", {})
                found |= {name: parts[part] for part, name in enumerate(names) if part in parts}
        self._program.set_adapter(slot, layers)

    def _adaptable(self, index: int) -> dict[str, tuple[str, ...]]:
        """Names of the program's matrices that are parts of a layer's modules."""
        layer = self._decoder.layer[index]
        found: dict[str, tuple[str, ...]] = {"o": ("o",)}
        if layer.attention is not None:
            gate = ("attention_gate",) if layer.attention.gate is not None else ()
            found["qkv"] = ("q", *gate, "k", "v")
        if layer.mlp is not None:
            found |= {"up": ("up",) if layer.mlp.gate is None else ("gate", "up"), "down": ("down",)}
        return found

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """As `Model.rescale_keys`; what is in pages already is of another scale."""
        self._model.rescale_keys(factors)
        self._program.replace(program_weights(self._model, self._program.isa))

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
        hidden = self._program.forward(input_ids, batch, kv, tap)
        return hidden[batch.ends] if last and batch.tokens > batch.rows else hidden

    def shallow(self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, layer: int) -> None:
        """Only K and V of the first layers, up to those of `layer`, go to their pages."""
        self._program.forward(input_ids, batch, kv, layers=layer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] → logits [rows, vocabulary], float32."""
        return self._program.logits(hidden)

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of token ids [...], as its table has them: [..., hidden] float32"""
        return self._program.embeddings(tokens.flatten()).unflatten(0, tokens.shape)

    def sketch(self) -> None:
        """Nothing of it is compiled while it runs."""
        return None

    def prefix_heads(self, layout: KVLayout) -> None:
        """It reads a shared prefix once a row."""
        return None

    def prepared_lengths(self, longest: int) -> list[int]:
        return []

    def forget_pages(self) -> None:
        self._program.forget_pages()

    def weights(self) -> tuple[()]:
        """They are in the memory of a CPU, and stay there."""
        return ()
