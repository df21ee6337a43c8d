"""EAGLE-3 and Medusa heads in the layouts they are published in: what reference modules, written from the published
definitions, draft."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from published_head_writer import HIDDEN, TABLE, VOCAB, write_eagle, write_medusa

from quire.generation.drafting.head_proposers import EagleProposer, MedusaProposer
from quire.generation.drafting.published_heads import load_published
from quire.types.errors import ConfigError, ModelFileError
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftContext

LAYERS = 8
CPU = torch.device("cpu")


def loaded(kind, path, **facts):
    facts = {"hidden": HIDDEN, "layers": LAYERS, "vocab": VOCAB} | facts
    return load_published(kind, str(path), **facts, device=CPU, dtype=torch.float32, embed=lambda t: TABLE[t])


def context():
    return DraftContext(Admit(0, "0/0", [1, 2], 2, SamplingParams(), 0, 0, []))


def observed(proposer, hidden, tokens):
    one, at = context(), 0
    for count in (1, 3, 2, len(tokens) - 6):
        one.tokens += tokens[at : at + count]
        one.hidden = hidden[at : at + count]
        proposer.observe(one, tokens[at : at + count])
        at += count
        proposer.propose([one], [2])
    return one


LAYOUTS = {
    "published": lambda name: name,
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "model.": lambda name: f"model.{name.replace('midlayer.', 'layers.0.')}" if "midlayer" in name else name,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle3_drafts_as_the_reference_does(layout, tmp_path):
    reference, d2t = write_eagle(tmp_path / "eagle", LAYOUTS[layout])
    drafter = loaded("eagle", tmp_path / "eagle")
    assert drafter.layers == (1, 3, 4)  # what layers 2, 4 and 5 of 8 read
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(20, 4 * HIDDEN, generator=generator)  # behind these three layers, and the last
    tokens = torch.randint(0, VOCAB, (20,), generator=generator).tolist()
    one = observed(EagleProposer(drafter), hidden, tokens)
    (draft,) = EagleProposer(drafter).propose([one], [4])
    assert draft == reference.draft(hidden[:, : 3 * HIDDEN], tokens, d2t, 4)
    states = drafter.features(hidden)
    torch.testing.assert_close(states, reference.fc(hidden[:, : 3 * HIDDEN]))


def test_eagle3_states_may_come_from_other_layers(tmp_path):
    reference, d2t = write_eagle(tmp_path / "eagle", eagle_config={"eagle_aux_hidden_state_layer_ids": [5, 1, 8]})
    drafter = loaded("eagle", tmp_path / "eagle")
    assert drafter.layers == (0, 4, 7)
    hidden = torch.randn(7, 4 * HIDDEN, generator=torch.Generator().manual_seed(5))
    low, middle, high, _ = hidden.split(HIDDEN, -1)
    one = observed(EagleProposer(drafter), hidden, list(range(7)))
    (draft,) = EagleProposer(drafter).propose([one], [3])
    assert draft == reference.draft(torch.cat((middle, low, high), -1), list(range(7)), d2t, 3)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_drafts_as_the_reference_does(prefix, tmp_path):
    tensors = write_medusa(tmp_path / "medusa", prefix=prefix)
    heads, one = loaded("medusa", tmp_path / "medusa"), context()
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(7))
    one.tokens, one.hidden = [1, 2, 5, 6], hidden
    proposer = MedusaProposer(heads)
    proposer.observe(one, [5, 6])
    wanted = []
    for head in range(3):  # ResBlock(x) = x + SiLU(Linear(x)), then a head of its own
        x = hidden[-1]
        for block in range(2):
            at = f"{prefix}{head}.{block}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{at}.weight"], tensors[f"{at}.bias"]))
        wanted.append(int(F.linear(x, tensors[f"{prefix}{head}.2.weight"]).argmax()))
    assert proposer.propose([one], [3]) == [wanted]
    assert proposer.propose([one], [2]) == [wanted[:2]]


def test_what_does_not_fit_is_refused(tmp_path):
    write_eagle(tmp_path / "eagle")
    write_medusa(tmp_path / "medusa")
    for kind, facts, error in [
        ("eagle", {"hidden": 32}, "hidden size is 64, the model's 32"),
        ("eagle", {"vocab": 60}, "is not one of the model's 60"),
        ("eagle", {"layers": 2}, "before layers .*the model has 2"),
        ("medusa", {"vocab": 60}, "made for another model"),
    ]:
        with pytest.raises((ConfigError, ModelFileError), match=error):
            loaded(kind, tmp_path / kind, **facts)
    with pytest.raises(ModelFileError, match="unexpected tensor"):
        loaded("medusa", tmp_path / "eagle")
    with pytest.raises(ModelFileError, match="cannot be used"):
        loaded("eagle", tmp_path / "medusa")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="a pickle, which is never read"):
        loaded("eagle", tmp_path / "pickled")
