"""Draft heads: what is saved is what is loaded, what is not theirs is refused, and drafting agrees with training."""

import pytest
import torch

from quire.generation.drafting.head_proposers import EagleProposer, MedusaProposer, Recorder
from quire.generation.drafting.heads import WINDOW_TOKENS, EagleDrafter, MedusaHeads, load_heads, save_heads
from quire.types.errors import ConfigError, ModelFileError
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftContext

HIDDEN, WORDS, VOCAB, LAYERS = 16, 20, 50, (1, 2)
SHOWN = {"medusa": HIDDEN, "eagle": 3 * HIDDEN}
CPU = torch.device("cpu")


def made(kind, seed=3):
    torch.manual_seed(seed)
    heads = MedusaHeads(HIDDEN, WORDS, VOCAB, 3) if kind == "medusa" else EagleDrafter(HIDDEN, WORDS, VOCAB, 4, LAYERS)
    heads.words.ids.copy_(torch.arange(0, 2 * WORDS, 2))
    heads.words.index()
    with torch.no_grad():
        heads.words.embed.normal_()
        if kind == "eagle":
            heads.distance.normal_()
    return heads.eval().requires_grad_(False)


def context(slot=0, prompt=(1, 2)):
    return DraftContext(Admit(slot, f"{slot}/0", list(prompt), len(prompt), SamplingParams(), 0, 0, []))


def grow(proposer, one, tokens, hidden):
    one.tokens += tokens
    one.hidden = hidden
    proposer.observe(one, tokens)
    one.hidden = None


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_saved_heads_come_back(kind, tmp_path):
    heads, path = made(kind), str(tmp_path / "heads.safetensors")
    save_heads(heads, path, {"model": "m"})
    loaded = load_heads(kind, path, hidden=HIDDEN, layers=4, vocab=VOCAB, device=CPU)
    for name, tensor in heads.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name].float(), tensor.float(), atol=2e-3), name
    with pytest.raises(ConfigError, match="train some"):
        load_heads("eagle" if kind == "medusa" else "medusa", path, hidden=HIDDEN, layers=4, vocab=VOCAB, device=CPU)
    with pytest.raises(ConfigError, match="another model"):
        load_heads(kind, path, hidden=HIDDEN * 2, layers=4, vocab=VOCAB, device=CPU)
    with pytest.raises(ConfigError, match="another model"):
        load_heads(kind, path, hidden=HIDDEN, layers=4, vocab=10, device=CPU)
    if kind == "eagle":
        with pytest.raises(ConfigError, match="another model"):
            load_heads(kind, path, hidden=HIDDEN, layers=2, vocab=VOCAB, device=CPU)
    (tmp_path / "cut").write_bytes((tmp_path / "heads.safetensors").read_bytes()[:-5])
    for bad in ("nothing", "cut"):
        with pytest.raises(ModelFileError, match="cannot read"):
            load_heads(kind, str(tmp_path / bad), hidden=HIDDEN, layers=4, vocab=VOCAB, device=CPU)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_drafts_do_not_depend_on_who_else_is_drafted_for(kind):
    heads = made(kind)
    make = MedusaProposer if kind == "medusa" else EagleProposer
    together, contexts = make(heads), [context(slot) for slot in range(4)]
    torch.manual_seed(1)
    steps = [[(slot, [7 + slot] * (1 + step % 3), torch.randn(1 + step % 3, SHOWN[kind])) for slot in range(4)]
             for step in range(2 * WINDOW_TOKENS)]  # fmt: skip
    for step in steps:
        for slot, tokens, hidden in step:
            grow(together, contexts[slot], tokens, hidden)
        batched = together.propose(contexts, [3, 1, 3, 2])
        assert [len(d) for d in batched] == [3, 1, 3, 2]
    alone, one = make(heads), context(2)
    for step in steps:
        grow(alone, one, *step[2][1:])
        if step is steps[5]:
            alone.propose([one], [2])  # asking on the way changes nothing
    assert alone.propose([one], [3]) == [batched[2]]


@pytest.mark.parametrize(("kind", "make"), [("medusa", MedusaProposer), ("eagle", EagleProposer)])
def test_nothing_is_drafted_where_states_are_unknown(kind, make):
    proposer, one = make(made(kind)), context()
    assert proposer.propose([one], [3]) == [[]]
    grow(proposer, one, [4, 5], torch.randn(1, SHOWN[kind]))  # the second was forced
    assert proposer.propose([one], [3]) == [[]]
    grow(proposer, one, [6], torch.randn(1, SHOWN[kind]))
    assert len(proposer.propose([one, context(1)], [2, 3])[0]) == 2


def test_a_recorder_keeps_what_was_drawn():
    recorder, one = Recorder(), context()
    states = torch.randn(3, HIDDEN)
    grow(recorder, one, [4], states[:1])
    grow(recorder, one, [5, 6], states[1:])
    tokens, kept = recorder.answers["0/0"]
    assert tokens == [4, 5, 6] and torch.equal(torch.cat(kept), states)
    assert recorder.propose([one], [3]) == [[]]
