"""A plain checkpoint to a quantised one: layer by layer, so that beside the hidden states of the calibration text only
one layer is in memory, each seeing what the quantised layers before it make of the text.

Refuses to know: tokenizers, how perplexity is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from quire.kernels.reference.dequant import FLOATS, dequantize
from quire.model.blocks.linear import Linear, Module
from quire.model.blocks.norms import Norm
from quire.model.calibration import weight_rounding as rounding
from quire.model.calibration.checkpoint_writer import CheckpointWriter
from quire.model.calibration.layer_runner import LayerRunner
from quire.model.calibration.observed_inputs import ObservedInputs
from quire.model.calibration.recipe import Recipe
from quire.model.calibration.scale_folding import Fold, Round, awq_scales, folds, smooth_scales
from quire.model.decoder_spec import Attention, DecoderSpec, Dense, Experts
from quire.model.families.architecture import Target
from quire.model.families.registry import read_family
from quire.model.loading.expert_tensors import is_stacked
from quire.model.loading.load import checked_targets
from quire.model.loading.packed_weights import STAY_FLOATS
from quire.model.quantization.scheme import State
from quire.types.errors import ConfigError
from quire.types.seams import WeightSource

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class Report:
    layers: int
    matrices: int  # that were quantised
    source_bytes: int  # of its weights
    written_bytes: int


def quantize_checkpoint(
    source: WeightSource,
    files: Path,
    out: Path,
    recipe: Recipe,
    samples: Sequence[Sequence[int]],
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """`files`: the folder of the source, whose tokenizer goes along. `samples`: token ids of the calibration text."""
    family, spec = read_family(source)
    _refuse(source, spec)
    if not samples:
        raise ConfigError("there is nothing to calibrate with; take a longer text")
    targets = checked_targets(family, spec, source)
    writer = CheckpointWriter(out, recipe)
    try:
        work = _Work(source, spec, targets, recipe, writer, torch.device(device))
        work.all_layers(samples, progress)
        writer.finish(files, {k: v for k, v in source.metadata().items() if k != "quantization_config"})
    except BaseException:
        writer.abandon()
        raise
    source_bytes = sum(info.nbytes for info in source.tensors().values())
    return Report(len(spec.layers), work.matrices, source_bytes, writer.nbytes)


def _refuse(source: WeightSource, spec: DecoderSpec) -> None:
    metadata = source.metadata()
    if "general.architecture" in metadata:
        raise ConfigError("a GGUF cannot be quantised again into safetensors; name the folder of its plain checkpoint")
    if metadata.get("quantization_config") or metadata.get("compression_config"):
        raise ConfigError("this checkpoint is quantised already; name the plain one that it was made from")
    odd = next((layer for layer in spec.layers if not _ordinary(layer.mixer, layer.feed)), None)
    if odd is not None or spec.learned_positions:
        raise ConfigError(
            f"{spec.architecture} is not among what is calibrated here: decoders whose layers are attention and an MLP "
            "or experts, with rotary positions; --quantize on load may do"
        )
    if stacked := next((info.name for info in source.tensors().values() if is_stacked(info)), None):
        raise ConfigError(f"{stacked} holds several matrices, and checkpoints with a tensor each are calibrated here")


def _ordinary(mixer: object, feed: object) -> bool:
    if isinstance(feed, Experts):
        return isinstance(mixer, Attention) and not (feed.own_norms or feed.router.weighs_input or feed.bias)
    return isinstance(mixer, Attention) and isinstance(feed, Dense)


def _as_stored(target: Target, rows: torch.Tensor) -> torch.Tensor:
    """Rows in the order that the file has them in."""
    return rows if target.order is None else rows[target.order.index(len(rows)).argsort().to(rows.device)]


@dataclass(frozen=True)
class _Part:
    """A matrix: all of a linear's, or an expert's."""

    module: str  # within the layer
    linear: Linear
    index: int
    rows: slice  # of the linear's
    names: list[str]  # of its tensors


class _Work:
    def __init__(
        self,
        source: WeightSource,
        spec: DecoderSpec,
        targets: dict[str, Target],
        recipe: Recipe,
        writer: CheckpointWriter,
        device: torch.device,
    ):
        self._source, self._spec, self._targets = source, spec, targets
        self._recipe, self._writer, self._device = recipe, writer, device
        self._tensors = source.tensors()
        self.matrices = 0
        first = next(name for name, target in targets.items() if target.module.startswith("layers."))
        self._scale_dtype = FLOATS[self._tensors[first].kind]
        self._by_layer: defaultdict[int | None, list[str]] = defaultdict(list)
        for name in self._tensors:
            module = targets[name].module if name in targets else ""
            self._by_layer[int(module.split(".")[1]) if module.startswith("layers.") else None].append(name)

    def all_layers(self, samples: Sequence[Sequence[int]], progress: Progress | None) -> None:
        for name in self._by_layer[None]:  # embeddings, the last norm, the head, and what no layer needs
            self._writer.plain(name, self._stored(name))
        hidden = self._embedded(samples)
        count = len(self._spec.layers)
        for index in range(count):
            runner = self._filled(index)
            if self._recipe.scheme == "gptq":
                hidden = self._quantise_in_turn(index, runner, hidden)
            else:
                self._quantise(index, runner, hidden)
                if index + 1 < count:
                    hidden = [runner.run([sample])[0] for sample in hidden]
            if progress is not None:
                progress(index + 1, count)

    def _stored(self, name: str) -> torch.Tensor:
        """As it is in the file."""
        info = self._tensors[name]
        raw = torch.from_numpy(self._source.read(name).copy())
        return (raw.view(FLOATS[info.kind]) if info.kind in FLOATS else raw).reshape(info.shape)

    def _embedded(self, samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        name = next(name for name, target in self._targets.items() if target.module == "embed")
        rows = self._targets[name].stored(self._tensors[name], self._source.read(name)).rows()
        scale = self._spec.embedding_scale
        return [
            dequantize(rows[torch.tensor(sample)], self._tensors[name].kind).float().to(self._device) * scale
            for sample in samples
        ]

    def _filled(self, index: int) -> LayerRunner:
        runner = LayerRunner(self._spec, index, self._device)
        for name in self._by_layer[index]:
            target = self._targets[name]
            module = runner.modules[target.module.removeprefix(f"layers.{index}.")]
            module.load(target.kind, target.part, target.stored(self._tensors[name], self._source.read(name)))
        runner.finish()
        return runner

    def _quantise_in_turn(self, index: int, runner: LayerRunner, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """GPTQ: each matrix when its inputs come, which those before it, rounded, have made. Hidden states behind the
        layer."""
        left = {(id(part.linear.state), part.index): part for part in self._parts(index, runner)}

        def round_to_inputs(state: State, which: int, x: torch.Tensor) -> None:
            part = left.pop((id(state), which))
            self._round(part, self._rounding(part, x.t() @ x))

        hidden = runner.run(hidden, round_to_inputs)
        for part in left.values():  # experts that nothing of the text went to
            self._round(part, self._rounding(part))
        self._write_plain(index, runner)
        return hidden

    def _parts(self, index: int, runner: LayerRunner) -> Iterator[_Part]:
        """A layer's matrices, with the tensors that they are stored as."""
        for module, linear in runner.matrices.items():
            place, count = f"layers.{index}.{module}", runner.count(linear)
            each = len(linear.parts) // count
            names: list[list[str]] = [[] for _ in range(count)]
            for name in self._by_layer[index]:
                target = self._targets[name]
                if target.module == place and target.kind == "weight":
                    names[target.part // each].append(name)
            rows = sum(linear.parts[:each])
            for which in range(count):
                yield _Part(module, linear, which, slice(which * rows, (which + 1) * rows), names[which])

    def _write_plain(self, index: int, runner: LayerRunner) -> None:
        """What is no matrix of a layer."""
        for name in self._by_layer[index]:
            module = runner.modules[self._targets[name].module.removeprefix(f"layers.{index}.")]
            if not isinstance(module, Linear) or self._targets[name].kind == "bias":
                self._writer.plain(name, self._changed(name, module))

    def _quantise(self, index: int, runner: LayerRunner, hidden: list[torch.Tensor]) -> None:
        recipe = self._recipe
        seen = runner.observe(hidden, gram=recipe.bits == 4)
        if recipe.scheme == "awq":
            parts = self._parts(index, runner)
            plain = {id(part.linear): round_to for part in parts if (round_to := self._rounding(part))}
            self._fold(index, runner, seen, lambda fold: awq_scales(fold, seen, plain))
        elif recipe.scheme == "smoothquant":
            self._fold(index, runner, seen, lambda fold: smooth_scales(fold, seen, recipe.alpha))
        self._write_plain(index, runner)
        for part in self._parts(index, runner):
            inputs = seen[id(part.linear)][part.index]
            # queries and keys meet in products, where clipped ranges cost more than their own outputs tell
            clipped = recipe.scheme == "awq" and part.module != "qkv" and inputs.count
            matter = inputs.mean_square if inputs.count else None
            self._round(part, self._rounding(part, inputs.gram if clipped else None, matter))

    def _fold(
        self,
        index: int,
        runner: LayerRunner,
        seen: dict[int, list[ObservedInputs]],
        choose: Callable[[Fold], torch.Tensor | None],
    ) -> None:
        modules = {id(module): name for name, module in runner.modules.items()}

        def keep(norm: Norm, weight: torch.Tensor) -> torch.Tensor:
            place = f"layers.{index}.{modules[id(norm)]}"
            target, info = next(
                (t, self._tensors[n]) for n, t in self._targets.items() if t.module == place and t.kind == "weight"
            )
            return (weight - target.offset).to(FLOATS[info.kind]).float() + target.offset

        for fold in folds(runner.layer):
            if (scales := choose(fold)) is not None:
                wide = fold.apply(scales, keep)
                for inputs in (inputs for reader in fold.readers for inputs in seen[id(reader)]):
                    inputs.divide(wide)

    def _changed(self, name: str, module: Module) -> torch.Tensor:
        """What a tensor of a layer is now, as it is to be stored."""
        info, target = self._tensors[name], self._targets[name]
        whole = module.tensors()[target.kind]
        first = sum(module.parts[: target.part]) if isinstance(module, Linear) else 0
        return _as_stored(target, whole[first : first + info.shape[0]] - target.offset).to(FLOATS[info.kind])

    def _round(self, part: _Part, round_to: Round | None) -> None:
        """Round a matrix, write the tensors it is stored as, and leave in it what they mean."""
        recipe, linear, weight = self._recipe, part.linear, part.linear.state["weight"]
        rounded = None if round_to is None else round_to(weight[part.rows])
        for name in part.names:
            if rounded is None or recipe.kept(name.removesuffix(".weight")):
                self._writer.ignored(name)
                self._writer.plain(name, self._changed(name, linear))
                continue
            first, count = sum(linear.parts[: self._targets[name].part]), self._tensors[name].shape[0]
            wanted = torch.arange(first, first + count, device=weight.device)
            weight[wanted] = rounded.rows(wanted - part.rows.start).dense()
            stored = _as_stored(self._targets[name], wanted - part.rows.start)
            self._writer.matrix(name, rounded.rows(stored), self._scale_dtype)
            self.matrices += 1

    def _rounding(
        self, part: _Part, gram: torch.Tensor | None = None, matter: torch.Tensor | None = None
    ) -> Round | None:
        """How a matrix is rounded; without what it has seen, to the nearest. None: no group divides its columns, or it
        chooses experts, or weighs them."""
        recipe, group = self._recipe, self._recipe.group_of(part.linear.columns)
        if group is None or part.module in STAY_FLOATS:
            return None
        if recipe.scheme == "fp8":
            return partial(rounding.nearest_fp8, scale_dtype=self._scale_dtype, matter=matter)
        grid = rounding.Grid(recipe.bits, recipe.symmetric, group, self._scale_dtype)
        if gram is None:
            return partial(rounding.nearest, grid=grid)
        if recipe.scheme == "gptq":
            return partial(rounding.gptq, gram=gram, grid=grid, act_order=recipe.ordered)
        return partial(rounding.clipped, gram=gram, grid=grid)
