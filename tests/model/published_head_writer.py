"""Random EAGLE-3 and Medusa heads in the layouts they are published in, and a reference module of EAGLE-3."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

HIDDEN, VOCAB, WORDS = 64, 97, 40
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": WORDS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


class Eagle3Reference(nn.Module):
    """Midlayer and heads as in EAGLE's cnets.py (version 3), over a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        dim = HIDDEN // 4
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * HIDDEN, 4 * dim, bias=False),
                        "k_proj": nn.Linear(2 * HIDDEN, 2 * dim, bias=False),
                        "v_proj": nn.Linear(2 * HIDDEN, 2 * dim, bias=False),
                        "o_proj": nn.Linear(4 * dim, HIDDEN, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(HIDDEN, 80, bias=False),
                        "up_proj": nn.Linear(HIDDEN, 80, bias=False),
                        "down_proj": nn.Linear(80, HIDDEN, bias=False),
                    }
                ),
                "hidden_norm": nn.RMSNorm(HIDDEN, 1e-5),
                "input_layernorm": nn.RMSNorm(HIDDEN, 1e-5),
                "post_attention_layernorm": nn.RMSNorm(HIDDEN, 1e-5),
            }
        )
        self.norm = nn.RMSNorm(HIDDEN, 1e-5)
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def layer(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[positions, hidden] and the token behind each → the states behind these, causally."""
        mid, count = self.midlayer, len(tokens)
        both = torch.cat((mid["input_layernorm"](TABLE[tokens]), mid["hidden_norm"](states)), -1)
        attention, dim = mid["self_attn"], HIDDEN // 4
        q, k, v = (attention[f"{n}_proj"](both).view(count, -1, dim).transpose(0, 1) for n in "qkv")
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

        def rotate(x: torch.Tensor) -> torch.Tensor:
            return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin

        q, k, v = rotate(q), rotate(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = states + attention["o_proj"](mixed)
        normed, mlp = mid["post_attention_layernorm"](x), mid["mlp"]
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def draft(self, hidden: torch.Tensor, tokens: list[int], d2t: torch.Tensor, count: int) -> list[int]:
        """Greedy, from the target's three states at each position [positions, 3 hidden] and the tokens behind them."""
        states, drafted = self.fc(hidden), []
        for _ in range(count):
            behind = self.layer(states, torch.tensor([*tokens, *drafted]))[-1]
            best = int(self.lm_head(self.norm(behind)).argmax())
            drafted.append(best + int(d2t[best]))
            states = torch.cat((states, behind[None]))
        return drafted


def write_eagle(directory, rename=lambda name: name, **more):
    directory.mkdir()
    torch.manual_seed(4)
    reference = Eagle3Reference()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    ids = torch.randperm(VOCAB)[:WORDS].sort().values
    d2t = ids - torch.arange(WORDS)
    tensors = {"d2t": d2t, "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    tensors |= dict(reference.state_dict())
    save_file({rename(name): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | more))
    return reference.requires_grad_(False), d2t


def write_medusa(directory, count=3, depth=2, prefix="", **more):
    directory.mkdir()
    torch.manual_seed(6)
    tensors = {}
    for head in range(count):
        for block in range(depth):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN) * 0.2
            tensors[f"{prefix}{head}.{block}.linear.bias"] = torch.randn(HIDDEN) * 0.2
        tensors[f"{prefix}{head}.{depth}.weight"] = torch.randn(VOCAB, HIDDEN)
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": count, "medusa_num_layers": depth} | more
    (directory / "config.json").write_text(json.dumps(config))
    return tensors
