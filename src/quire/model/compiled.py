"""The compiled decoder as a model: same face as `Model`, weights packed from a quantised GGUF, one call per step.

Claims layers of Llama's kind (RMS norms before, rotary positions, SwiGLU) whole, on a CPU. Knows: which specs the
program can run, where stored tensors go in it. Refuses to know: how the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quire.kernels import cpu
from quire.kernels.attention_backend import Batch
from quire.kernels.cpu.program import KV_KINDS, DecoderWeights, LayerWeights
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.kernels.reference.dequant import FORMATS
from quire.model.blocks.class_head import ClassHeadBlock
from quire.model.blocks.low_rank import Update, Updates
from quire.model.blocks.rope_scaling import inverse_frequencies
from quire.model.decoder_spec import Attention, DecoderSpec, Dense, sparse_at
from quire.model.families.architecture import Target
from quire.model.loading.held_model import WeightMemory
from quire.model.loading.stored_tensor import StoredTensor, not_finite
from quire.types.errors import ModelFileError
from quire.types.kv import KVLayout
from quire.types.seams import WeightSource

Place = tuple[str, str, int]  # module, kind, part
_MATRICES = {
    "q": ("qkv", 0),
    "k": ("qkv", 1),
    "v": ("qkv", 2),
    "o": ("o", 0),
    "gate": ("up", 0),
    "up": ("up", 1),
    "down": ("down", 0),
}


def refusal(
    spec: DecoderSpec, targets: Mapping[str, Target], source: WeightSource, device: torch.device, *, floats: bool
) -> str | None:
    """None if the compiled decoder can run this model here, else the reason it cannot. `floats`: whether plain matrices
    may be packed to 8 bits."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if reason := cpu.available():
        return reason
    if unknown := unknown_to_program(spec):
        return f"{spec.architecture} has {unknown}, which it does not know"
    if spec.head_dim % 32:
        return f"head dimension {spec.head_dim} is no multiple of 32"
    tensors = source.tensors()
    matrices = [name for name in targets if len(tensors[name].shape) == 2]
    plain = not any(tensors[name].kind in FORMATS for name in matrices)
    if plain and not floats:
        return "weights are not quantised, and are not to be"
    odd = [name for name in matrices if tensors[name].shape[1] % 32 or targets[name].transposed]
    return f"rows of {odd[0]!r} are no whole blocks of 32" if odd else None


def unknown_to_program(spec: DecoderSpec) -> str | None:
    """The first thing of a spec that the program has no code for."""
    first = spec.layers[0]
    if spec.recurrent or not isinstance(first.mixer, Attention):
        return "recurrent layers" if spec.recurrent else "latent attention"
    if spec.encoder:
        return "bidirectional attention"
    if spec.class_head is not None:
        return "a classification head"
    if spec.learned_positions:
        return "learned positions"
    if len(set(spec.rope_kinds)) > 1 or first.mixer.rope is None:
        return "layers that are rotated differently, or not at all"
    if spec.embedding_scale != 1.0 or spec.residual_scale != 1.0 or spec.logit_scale != 1.0:
        return "scaled embeddings, residuals or logits"
    if spec.logit_softcap is not None:
        return "a soft cap on logits"
    if spec.layer_input or any(layer.scaled for layer in spec.layers):
        return "per-layer embeddings, or layers with a scalar"
    if any(layer.parallel is not None for layer in spec.layers):
        return "attention and MLP beside each other"
    for mixer, feed, norms in ((layer.mixer, layer.feed, layer.norms) for layer in spec.layers):
        if norms.kind != "rms" or not norms.before or norms.after:
            return "other norms than RMS norms before attention and MLP"
        if not isinstance(mixer, Attention):
            return "latent attention"
        if mixer.gate:
            return "attention with an output gate"
        if mixer.sinks:
            return "attention sinks"
        if mixer.query_scaling is not None:
            return "queries scaled by position"
        if mixer.softcap is not None:
            return "a soft cap on attention scores"
        if mixer.qk_norm in ("all", "unit"):
            return "norms of queries and keys over all heads, or without weights"
        if mixer.kv_parts < 2 or mixer.v_norm:
            return "values that are normed, are keys, or are another layer's"
        if mixer.chunked:
            return "chunked attention"
        if not isinstance(feed, Dense) or not isinstance(first.feed, Dense):
            return "experts"
        if not feed.swiglu or feed.bias:
            return "another MLP than SwiGLU without biases"
        if (mixer.heads, mixer.head_dim) != (first.mixer.heads, first.mixer.head_dim):
            return "layers of different sizes"
        if mixer.kv_heads != first.mixer.kv_heads or feed.intermediate != first.feed.intermediate:
            return "layers of different sizes"
    return None


class CompiledModel:
    """Made by `load_model` once names and shapes are checked; ready when made."""

    kv_dtype = "float16"  # what K and V are best kept in
    kv_kinds = KV_KINDS
    dtype = torch.float32  # of hidden states and logits
    class_head: ClassHeadBlock | None = None

    def __init__(
        self,
        spec: DecoderSpec,
        targets: Mapping[str, Target],
        source: WeightSource,
        *,
        threads: int,
        length: int | None = None,
        isa: str | None = None,
        held: WeightMemory | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        """`held`: where packed matrices are, if they are held, or are put."""
        self.spec = spec
        self.device = torch.device("cpu")
        self.threads = threads
        self.length = length or spec.max_position
        kinds = {info.kind for name, info in source.tensors().items() if name in targets and len(info.shape) == 2}
        self._kept = "weights stay quantised" if kinds & set(FORMATS) else "weights quantised to 8 bits"
        packer = _Packer(spec, targets, source, isa, held, progress)
        weights = packer.decoder(self.length)
        packer.publish()
        self._program = cpu.NativeProgram(weights, threads=threads, isa=isa)
        self.inverse_frequencies = [weights.inverse_frequencies] * len(spec.layers)
        self.draw = self._program.drawer()

    def describe(self) -> list[str]:
        """What was chosen to run it and why, for people."""
        return [f"decoder: compiled ({self._program.isa}), {self._kept}, {self.threads} threads"]

    adapter_slots = 0
    updated = 0  # nothing is captured

    def reserve_adapters(self, slots: int, rank: int) -> None:
        """As `Model.reserve_adapters`; an adapter is packed to 8 bits, as weights are."""
        self.adapter_slots = slots
        self._program.reserve_adapters(slots, rank)

    def set_adapter(self, slot: int, updates: Updates) -> None:
        """As `Model.set_adapter`."""
        layers: list[dict[str, Update]] = [{} for _ in self.spec.layers]
        for index, layer in enumerate(layers):
            for name, (module, part) in _MATRICES.items():
                if (update := updates.get(f"layers.{index}.{module}", {}).get(part)) is not None:
                    layer[name] = update
        self._program.set_adapter(slot, layers)

    def rescale_keys(self, factors: torch.Tensor) -> None:
        """As `Model.rescale_keys`."""
        self._program.rescale_keys(factors)

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


class _Packer:
    """Tensors one by one from the source to where they stay."""

    def __init__(
        self,
        spec: DecoderSpec,
        targets: Mapping[str, Target],
        source: WeightSource,
        isa: str | None,
        held: WeightMemory | None,
        progress: Callable[[int, int], None] | None,
    ):
        self._spec = spec
        self._isa = isa
        self._source = source
        self._tensors = source.tensors()
        self._names: dict[Place, str] = {(t.module, t.kind, t.part): name for name, t in targets.items()}
        self._targets = targets
        self._progress = progress
        self._total = sum(self._tensors[name].nbytes for name in targets)
        self._done = 0
        matrices = [self._tensors[name] for name in targets if len(self._tensors[name].shape) == 2]
        size = sum(cpu.Store.needs(m.shape[0], m.shape[1], m.kind, isa) for m in matrices)
        self._memory, self._found = held, False
        self._store = cpu.Store(size, None if held is None else self._held_block(held, size))

    def _held_block(self, held: WeightMemory, size: int) -> torch.Tensor | None:
        """With all matrices packed, or to pack them into; None: they cannot be held."""
        if (found := held.find()) is not None:
            if [len(each) for each in found[0]] == [size]:
                self._found = True
                return found[0][0]
            held.discard("held weights are not those of this model; they are loaded")
        elif 0 < held.limit < size:
            held.refuse(f"weights are not held: they take {size:,} bytes, hold_weights allows {held.limit:,}")
        block = held.create(size) if size <= held.limit else None
        self._memory = None if block is None else held
        return block

    def publish(self) -> None:
        """All matrices are packed."""
        if self._memory is not None and not self._found:
            self._memory.publish(b"")

    def decoder(self, length: int) -> DecoderWeights:
        spec = self._spec
        rope = spec.layers[0].mixer.rope
        assert rope is not None
        frequencies, rope_scale = inverse_frequencies(rope, spec.max_position, length)
        if (divisors := self._vector("rope_divisors")) is not None:
            frequencies = frequencies / divisors
        embed = self._matrix("embed", 0)
        first = spec.layers[0]
        assert isinstance(first.feed, Dense)
        return DecoderWeights(
            hidden=spec.hidden,
            heads=spec.attention.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=first.feed.intermediate,
            eps=first.norms.eps,
            rope_scale=rope_scale,
            inverse_frequencies=frequencies,
            embed=embed,
            layers=[self._layer(index) for index in range(len(spec.layers))],
            final_norm=self._norm("final_norm"),
            head=embed if spec.tie_embeddings else self._matrix("head", 0),
        )

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"layers.{index}."
        return LayerWeights(
            **{name: self._matrix(prefix + module, part) for name, (module, part) in _MATRICES.items()},
            input_norm=self._norm(prefix + "mixer_norm"),
            post_norm=self._norm(prefix + "feed_norm"),
            q_norm=self._vector(prefix + "q_norm"),
            k_norm=self._vector(prefix + "k_norm"),
            q_bias=self._vector(prefix + "qkv", "bias", 0),
            k_bias=self._vector(prefix + "qkv", "bias", 1),
            v_bias=self._vector(prefix + "qkv", "bias", 2),
            o_bias=self._vector(prefix + "o", "bias"),
            scale=self._spec.attending[index].scale,
            window=self._spec.attending[index].window,
            sparse=sparse_at(self._spec, index),
        )

    def _stored(self, name: str) -> StoredTensor:
        info, target = self._tensors[name], self._targets[name]
        self._done += info.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return target.stored(info, self._source.read(name))

    def _matrix(self, module: str, part: int) -> cpu.PackedMatrix:
        name = self._names[module, "weight", part]
        info = self._tensors[name]
        packed = cpu.PackedMatrix(self._store, info.shape[0], info.shape[1], info.kind, self._isa)
        if self._found:
            return packed
        if not packed.fill(self._stored(name).rows()):
            raise ModelFileError(not_finite(name))
        return packed

    def _norm(self, module: str) -> torch.Tensor:
        vector = self._vector(module)
        assert vector is not None
        return vector

    def _vector(self, module: str, kind: str = "weight", part: int = 0) -> torch.Tensor | None:
        name = self._names.get((module, kind, part))
        if name is None:
            return None
        out = torch.empty(self._tensors[name].shape)
        self._stored(name).copy_into(out)
        return out
