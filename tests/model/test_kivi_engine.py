"""KV at 4 and 2 bits with a residual under the real engine: a sequence says the same alone, batched, cut into chunks,
preempted, forked, on prefix hits and out of tiers."""

import random

import pytest
import torch
from tiny_engine import Engine, KnowingProposer
from transformers import LlamaConfig, LlamaForCausalLM

from quire.assets import resolve as find
from quire.generation.drafting.speculation import Speculation
from quire.kernels.cpu import shared_object as library
from quire.model import read_spec
from quire.model.blocks.fused import FusedStages
from quire.runtime.capacity import kv_layout
from quire.runtime.hardware import Hardware, resolve
from quire.scheduling.features.tier_prefetch import TierPrefetch
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, InputError
from quire.types.kv import RESIDUAL, RESIDUAL_GROUP, TokenShape, layout_for
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

rng = random.Random(7)
PREFIX = [rng.randrange(97) for _ in range(224)]
PROMPTS = [PREFIX + [rng.randrange(97) for _ in range(n)] for n in (9, 41, 77)] + [PREFIX[:30]]
ROOM = {"page_size": 16, "max_model_len": 384, "kv_pages": 200}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Of heads of 64, so that the compiled decoder takes it at 2 bits too."""
    return saved(tmp_path_factory.mktemp("kivi"), 64)


def saved(folder, head_dim):
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[("auto", "kivi4"), ("auto", "kivi2"), ("float32", "kivi2")], ids="-".join)
def options(request):
    dtype, kind = request.param
    if dtype == "auto" and (reason := library.available()):
        pytest.skip(reason)
    return {"dtype": dtype, "kv_dtype": kind, **ROOM}


@pytest.fixture(scope="module")
def alone(path, options):
    return [Engine(path, prefix_cache=False, **options).answers([prompt])[0] for prompt in PROMPTS]


def test_the_residual_matters(path, options, alone):
    """Else these tests would show nothing."""
    plain = Engine(path, **options | {"kv_dtype": "auto"}).answers(PROMPTS)
    assert plain[:3] != alone[:3] and plain[3] == alone[3]


def test_batched_chunked_and_preempted(path, options, alone):
    assert Engine(path, **options).answers(PROMPTS) == alone
    assert Engine(path, max_batch_tokens=23, prefix_cache=False, **options).answers(PROMPTS) == alone
    assert Engine(path, depth=2, **options).answers(PROMPTS, preempt=5) == alone


def test_prefix_hits(path, options, alone):
    engine = Engine(path, **options)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        assert engine.answers([prompt]) == [expected]
    page = engine.core.scheduler.memory.layout.alignment
    assert engine.core.stats().cached_tokens >= 2 * (len(PREFIX) // page * page)
    assert engine.answers(PROMPTS) == alone


def test_forks(path, options):
    """Branches part inside a group of tokens, and again say what they would alone."""
    sampled = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=50, ignore_eos=True)
    engine = Engine(path, **options)
    branches = engine.answers([PROMPTS[0]], params=sampled)
    assert len({tuple(branch) for branch in branches}) == 3
    assert engine.answers([PROMPTS[0]], params=sampled) == branches
    small = Engine(path, max_batch_tokens=16, **options | {"kv_pages": 60})
    assert small.answers([PROMPTS[0]], params=sampled, preempt=9) == branches


def test_draft_tokens_that_are_rejected_leave_nothing_behind(path, options, alone):
    engine = Engine(path, speculation="ngram", draft_tokens=6, draft_adapt=False, **options)
    whole = [prompt + answer for prompt, answer in zip(PROMPTS, alone, strict=True)]
    engine.core.executor._head.speculate(Speculation(KnowingProposer(whole)))
    assert engine.answers(PROMPTS) == alone == engine.answers(PROMPTS)
    assert engine.core.scheduler.stats.accepted_tokens > 50 and engine.core.scheduler.stats.waste["draft"] > 10


def test_pages_come_back_from_tiers(path, options, tmp_path, monkeypatch):
    """Whatever is quicker: so small a model computes pages as fast as a busy machine copies them."""
    monkeypatch.setattr(TierPrefetch, "_pays", lambda *_: True)
    draw = random.Random(9)
    asked = [[draw.randrange(97) for _ in range(300)] for _ in range(3)]
    expected = Engine(path, **options).answers(asked)
    disk = {"kv_disk": f"{tmp_path}/kv:4M"}
    for tier in ({"kv_host": "4M"}, disk, disk):
        engine = Engine(path, **options | {"kv_pages": 31}, **tier)  # one prompt at a time
        for _ in range(2):
            assert [engine.answers([prompt])[0] for prompt in asked] == expected
        assert sum(tier.hit_tokens for tier in engine.core.stats().tiers) >= 3 * 192
        engine.core.close()


@pytest.mark.parametrize("kind", ["kivi4", "kivi2"])
def test_what_a_window_gives_back_is_not_counted(path, kind):
    """A sequence takes whole pages of rounded tokens, and of the latest no more than the window and a step."""
    engine = Engine(path, dtype="float32", kv_dtype=kind, max_batch_tokens=16, **ROOM)
    layout, pool = engine.core.scheduler.memory.layout, engine.core.scheduler.memory.pool
    rounded = layout.groups[0].tokens_per_page
    window = -(-(RESIDUAL + RESIDUAL_GROUP - 1 + 16 + 15) // 16)
    assert layout.pages_for(3840) == -(-3840 // rounded) + window
    assert layout.tokens_in(layout.pages_for(3840)) >= 3840 > layout.tokens_in(layout.pages_for(3840) - 1)
    engine.answers([PROMPTS[2]])
    assert pool.peak <= layout.pages_for(len(PROMPTS[2]) + 24)


def test_layers_with_windows_keep_them_unrounded():
    shapes = [TokenShape(2, 64), TokenShape(2, 64, window=50), TokenShape(2, 64)]
    layout = layout_for(shapes, page_size=16, dtype="kivi4", own="float16")
    assert [group.layers for group in layout.groups] == [(0, 2), (0, 2), (1,)]
    assert [layout.kind_of(group).bits for group in layout.groups] == [4, 16, 16]
    assert layout.groups[0].residual == 1 and layout.groups[2].window == 50
    sizes = [group.tokens_per_page * layout._token_bytes(group) for group in layout.groups]
    assert max(sizes) == sizes[0] == layout.page_bytes


def test_what_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match="heads must be of 64, 128"):
        Engine(saved(tmp_path, 32), kv_dtype="kivi2")
    with pytest.raises(ConfigError, match="sparse_pages has no effect beside kv_dtype kivi4"):
        Engine(path, kv_dtype="kivi4", sparse_pages=40)
    gpu, spec = Hardware("cuda:0", "a GPU", 1 << 34, 8), read_spec(find(str(path)).open())
    asked = EngineOptions.of(kv_dtype="kivi2")
    with pytest.raises(ConfigError, match=r"pages cannot be kivi2: .* takes pages of bfloat16, .*int8"):
        kv_layout(asked, resolve(asked, gpu), spec, "bfloat16", ("bfloat16", *FusedStages.kv_kinds))
    engine = Engine(path, kv_dtype="kivi4", **ROOM)
    with pytest.raises(InputError, match="kv_budget"):
        budget = SamplingParams(max_tokens=4, kv_budget=64)
        engine.core.submit(Request(id="r", prompt=PROMPTS[0], params=budget))
