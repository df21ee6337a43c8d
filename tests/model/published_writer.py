"""Tiny checkpoints in published formats: written as their makers write them, with what their numbers mean beside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

Parts = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]  # weight → (stored parts, what they mean)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output lies in each place of a word


def write(model: PreTrainedModel, path: Path, config: dict, pack: Packer) -> None:
    """The model with the matrices of its layers packed; afterwards it has the numbers that the files mean."""
    tensors = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            parts, meant = pack(tensor)
            before = name.removesuffix(".weight")
            tensors |= {f"{before}.{part}": value.contiguous() for part, value in parts.items()}
            tensor.copy_(meant)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors")
    told = json.loads(model.config.to_json_string()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(told))


def grouped(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(integers, scales, zeros) of a weight [out, in]; the latter [out, groups]."""
    runs = weight.unflatten(1, (-1, group))
    low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    numbers = (runs / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return numbers.flatten(1).long(), scales, zeros.long()


def meant(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    return (numbers - zeros.repeat_interleave(group, 1)).float() * scales.repeat_interleave(group, 1)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed along the first dimension, low bits first, across the ends of words."""
    stream = (numbers.t().unsqueeze(-1) >> torch.arange(bits)) & 1  # [n, count, bits]
    stream = stream.flatten(1).unflatten(1, (-1, 32))
    packed = (stream << torch.arange(32)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).t()


def gptq(bits: int, group: int, *, act_order: bool = False, second: bool = False) -> Packer:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0)) if act_order else None
        shuffled = weight if order is None else weight[:, order]
        numbers, scales, zeros = grouped(shuffled, bits, group)
        zeros = zeros.clamp(min=0 if second else 1)
        numbers = (shuffled / scales.repeat_interleave(group, 1) + zeros.repeat_interleave(group, 1)).round()
        numbers = numbers.clamp(0, 2**bits - 1).long()
        value = meant(numbers, scales, zeros, group)
        index = torch.arange(weight.shape[1]) // group
        if order is not None:
            back = order.argsort()
            numbers, value, index = numbers[:, back], value[:, back], index[back]
        stored = zeros if second else zeros - 1
        parts = {
            "qweight": words(numbers.t(), bits),
            "qzeros": words(stored, bits).t(),
            "scales": scales.t().half(),
            "g_idx": index.int(),
        }
        return parts, value

    return pack


def cut_gptq(group: int) -> Packer:
    """4 bits in groups of which a row's last is cut short."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        columns = weight.shape[1]
        parts, value = gptq(4, group)(torch.nn.functional.pad(weight, (0, -columns % group)))
        parts |= {"qweight": parts["qweight"][: columns // 8], "g_idx": parts["g_idx"][:columns]}
        return parts, value[:, :columns]

    return pack


def packed_integers(group: int) -> Packer:
    """compressed-tensors, 4 bits around zero; a row's last group may be cut short."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        columns = weight.shape[1]
        runs = torch.nn.functional.pad(weight, (0, -columns % group)).unflatten(1, (-1, group))
        scales = runs.abs().amax(-1) / 7.5
        numbers = (runs / scales[..., None]).round().clamp(-8, 7)
        value = (numbers * scales[..., None]).flatten(1)[:, :columns]
        stored = (numbers.flatten(1)[:, :columns] + 8).long()
        parts = {
            "weight_packed": words(stored.t(), 4).t(),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return parts, value

    return pack


def awq(group: int) -> Packer:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        numbers, scales, zeros = grouped(weight, 4, group)

        def along_outputs(values: torch.Tensor) -> torch.Tensor:
            ordered = values.t().unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
            return words(ordered.t(), 4).t()

        parts = {"qweight": along_outputs(numbers), "qzeros": along_outputs(zeros), "scales": scales.t().half()}
        return parts, meant(numbers, scales, zeros, group)

    return pack


def fp8(kind: str, *, block: int = 16, scale_name: str = "weight_scale_inv") -> Packer:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        if kind == "block":
            rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
            padded = torch.zeros(rows * block, columns * block)
            padded[: weight.shape[0], : weight.shape[1]] = weight
            scale = padded.view(rows, block, columns, block).abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        else:
            scale = weight.abs().max().reshape(1) if kind == "tensor" else weight.abs().amax(1, keepdim=True)
            scale = scale / 448
            wide = scale.reshape(-1, 1)
        numbers = (weight / wide).to(torch.float8_e4m3fn)
        name = scale_name if kind == "block" else "weight_scale"
        return {"weight": numbers, name: scale, "input_scale": torch.ones(1)}, numbers.float() * wide

    return pack
