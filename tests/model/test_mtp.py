"""Multi-token-prediction layers as drafters: they draft what a reference made of transformers' layers does, answers are
those without them, and a layer that knows the model is right."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_engine import Engine
from tiny_models import prompts, tiny

from quire.assets import resolve
from quire.generation.drafting.head_proposers import EagleProposer
from quire.generation.drafting.mtp import MtpDrafter
from quire.model.loading.mtp_layer import load_mtp
from quire.types.errors import ConfigError, ModelFileError
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftContext

FAMILIES = ["deepseek-v3", "glm4-moe", "qwen3-next", "qwen3.5"]
both_kinds = pytest.mark.parametrize(  # of checkpoints: with the layer among the others, and apart
    "family", [f if f in ("deepseek-v3", "qwen3.5") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
LAYER = 3  # of another model, that is taken for the prediction layer: one that attends, with experts where it may


def is_apart(family):
    """Whether its layer is under mtp., and norms are stored less one."""
    return family.startswith("qwen")


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Reference:
    """Projection, a decoder layer of transformers over a whole sequence, norm and head."""

    def __init__(self, family, main, other, parts):
        self.main, self.other, self.parts = main, other, parts
        self.less_one, self.eps = float(is_apart(family)), main.config.rms_norm_eps

    def norm(self, x, weight):
        return rms(x, weight + self.less_one, self.eps)

    def layer(self, x):
        count = len(x)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rope = self.other.model.rotary_emb(x[None], positions)
        out = self.other.model.layers[LAYER](
            x[None], position_embeddings=rope, attention_mask=mask, position_ids=positions
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    def draft(self, hidden, tokens, count):
        states, known, drafted = hidden, list(tokens), []
        table, head = self.main.get_input_embeddings().weight, self.main.get_output_embeddings().weight
        for _ in range(count):
            embedded = self.norm(table[torch.tensor(known)], self.parts["embed_norm"])
            both = torch.cat((embedded, self.norm(states, self.parts["hidden_norm"])), -1)
            behind = self.layer(F.linear(both, self.parts["project"]))[-1]
            normed = self.norm(behind, self.parts["norm"])
            drafted.append(int(F.linear(normed, self.parts.get("head", head)).argmax()))
            known.append(drafted[-1])
            states = torch.cat((states, (normed if self.less_one else behind)[None]))
        return drafted


NAMES = {
    False: {
        "project": "eh_proj", "embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm",
        "head": "shared_head.head", "embed": "embed_tokens",
    },
    True: {
        "project": "fc", "embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm",
    },
}  # fmt: skip


def write(root, family, main, other, parts):
    """The checkpoint of `main` with a layer of `other` as its prediction layer."""
    for name, model in (("model", main), ("other", other)):
        model.save_pretrained(root / name)
    tensors, theirs = (load_file(root / name / "model.safetensors") for name in ("model", "other"))
    before = "mtp." if is_apart(family) else f"model.layers.{main.config.num_hidden_layers}."
    inner = before + ("layers.0." if is_apart(family) else "")
    at = f"model.layers.{LAYER}."
    tensors |= {inner + name.removeprefix(at): tensor for name, tensor in theirs.items() if name.startswith(at)}
    tensors |= {
        f"{before}{name}.weight": parts[part] for part, name in NAMES[is_apart(family)].items() if part in parts
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / "model" / "model.safetensors")
    config = json.loads((root / "model" / "config.json").read_text())
    (root / "model" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return root / "model"


def made(family, root):
    main, other = tiny(family), tiny(family, seed=1)
    hidden, vocab = main.config.hidden_size, main.config.vocab_size
    generator = torch.Generator().manual_seed(2)
    parts = {"project": torch.randn(hidden, 2 * hidden, generator=generator) * 0.2}
    parts |= {name: 0.2 * torch.randn(hidden, generator=generator) for name in ("embed_norm", "hidden_norm", "norm")}
    if not is_apart(family):
        parts |= {name: 1 + part for name, part in parts.items() if part.dim() == 1}
        parts["head"] = torch.randn(vocab, hidden, generator=generator)
        parts["embed"] = main.get_input_embeddings().weight.detach().clone()
    return write(root, family, main, other, parts), Reference(family, main, other, parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_the_references(family, tmp_path):
    path, reference = made(family, tmp_path)
    source = resolve(str(path)).open()
    layer = load_mtp(source, device=torch.device("cpu"), dtype=torch.float32, length=128)
    table = reference.main.get_input_embeddings().weight.detach()
    proposer = EagleProposer(MtpDrafter(layer, lambda tokens: table[tokens]))
    hidden = torch.randn(12, table.shape[1], generator=torch.Generator().manual_seed(3))
    (tokens,) = prompts(12)
    one = DraftContext(Admit(0, "0/0", [1, 2], 2, SamplingParams(), 0, 0, []))
    for at in range(0, 12, 3):
        one.tokens += tokens[at : at + 3]
        one.hidden = hidden[at : at + 3]
        proposer.observe(one, tokens[at : at + 3])
        with torch.inference_mode():
            (draft,) = proposer.propose([one], [4])
            assert draft == reference.draft(hidden[: at + 3], tokens[: at + 3], 4)


@both_kinds
def test_answers_are_those_without_drafts(family, tmp_path):
    path, _ = made(family, tmp_path)
    asked = prompts(*[3 + i % 11 for i in range(12)])
    wanted = Engine(path, kv_pages=300).answers(asked)
    drafting = Engine(path, kv_pages=300, speculation="mtp", draft_adapt=False)
    assert drafting.answers(asked) == wanted
    assert drafting.core.scheduler.stats.drafted_tokens > 200


@both_kinds
def test_a_layer_that_knows_the_model_is_accepted(family, tmp_path):
    """Layers that add nothing: the next token is a function of the last one's embedding, and the prediction layer
    passes that through."""
    main, other = tiny(family), tiny(family, seed=1)
    with torch.no_grad():
        for model in (main, other):
            for name, parameter in model.named_parameters():
                if "down_proj" in name or name.endswith(("o_proj.weight", "out_proj.weight")):
                    parameter.zero_()
    hidden, one = main.config.hidden_size, 0.0 if is_apart(family) else 1.0
    parts = {name: torch.full((hidden,), one) for name in ("embed_norm", "hidden_norm")}
    parts["project"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    parts["norm"] = main.model.norm.weight.detach().clone()
    if not is_apart(family):
        parts["head"] = main.get_output_embeddings().weight.detach().clone()
    path = write(tmp_path, family, main, other, parts)
    asked = prompts(5, 9)
    engine = Engine(path, kv_pages=300, speculation="mtp", draft_adapt=False)
    assert engine.answers(asked) == Engine(path, kv_pages=300).answers(asked)
    stats = engine.core.scheduler.stats
    assert stats.accepted_tokens == stats.drafted_tokens > 10


def test_checkpoints_without_such_a_layer_are_refused(tmp_path):
    tiny("llama3").save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="this one has none"):
        Engine(tmp_path / "plain", kv_pages=100, speculation="mtp")
    path, _ = made("glm4-moe", tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name, why in (("eh_proj.weight", "lacks tensors: project"), ("self_attn.k_proj.weight", "incomplete")):
        kept = {key: tensor for key, tensor in tensors.items() if key != f"model.layers.4.{name}"}
        save_file(kept, path / "model.safetensors")
        with pytest.raises(ModelFileError, match=why):
            Engine(path, kv_pages=100, speculation="mtp")
