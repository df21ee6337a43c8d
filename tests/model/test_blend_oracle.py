"""Blended prompts against transformers: caches of separately computed chunks joined by hand, and a selective pass."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from quire.assets import resolve
from quire.engine.core import EngineCore
from quire.runtime.executors.open_executor import open_executor
from quire.types.blend import Blend
from quire.types.config import EngineOptions
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

HEAD = [11, 12, 13, 14]
CHUNKS = [[20 + 7 * c + i for i in range(12)] for c in range(4)]  # all in whole pages of four tokens
PAIRS = [[0, 1], [1, 2], [2, 3], [3, 0]]  # that were asked about before
QUESTION = [3, 5, 8, 2, 9, 4]
LAYERS = 4


class Oracle:
    """K and V [layers, kv_heads, tokens, dim], and what follows from them, by transformers' own parts."""

    def __init__(self, model):
        self.model = model

    @torch.inference_mode()
    def cache(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(torch.tensor([tokens]), use_cache=True).past_key_values
        return torch.stack([layer.keys[0] for layer in found.layers]), torch.stack(
            [layer.values[0] for layer in found.layers]
        )

    def turned(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        cos, sin = self.model.model.rotary_emb(keys[None], torch.tensor([[by]]))
        return apply_rotary_pos_emb(keys, keys, cos, sin)[1]

    def joined(self, order: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The head and the first chunk as they are, the others from behind the head and another chunk, turned to where
        they stand."""
        parts = [self.cache(HEAD + CHUNKS[order[0]])]
        for at, chunk in enumerate(order[1:], 1):
            (before,) = (CHUNKS[first] for first, second in PAIRS if second == chunk)
            k, v = (x[:, :, len(HEAD + before) :] for x in self.cache(HEAD + before + CHUNKS[chunk]))
            parts.append((self.turned(k, (at - 1) * len(CHUNKS[0])), v))
        return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)

    @torch.inference_mode()
    def after(self, tokens: list[int], k: torch.Tensor, v: torch.Tensor, computed: list[int]) -> torch.Tensor:
        """Log-probabilities after the last token, if of all tokens only those at positions `computed` are, and K and V
        of the others are as given."""
        inner, config = self.model.model, self.model.config
        share = config.num_attention_heads // config.num_key_value_heads
        where = torch.tensor([computed])
        x = inner.embed_tokens(torch.tensor(tokens)[where])
        cos, sin = inner.rotary_emb(x, where)
        unseen = torch.arange(len(tokens))[None] > where[0][:, None]
        for index, layer in enumerate(inner.layers):
            normed = layer.input_layernorm(x)
            q, new_k, new_v = (
                project(normed).view(1, len(computed), -1, layer.self_attn.head_dim).transpose(1, 2)
                for project in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            )
            q, new_k = apply_rotary_pos_emb(q, new_k, cos, sin)
            k[index][:, computed], v[index][:, computed] = new_k[0], new_v[0]
            keys, values = repeat_kv(k[index][None], share), repeat_kv(v[index][None], share)
            scores = q @ keys.transpose(2, 3) * layer.self_attn.scaling
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
            x = x + layer.self_attn.o_proj((weights @ values).transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(inner.norm(x[0, -1])).log_softmax(-1)


@pytest.fixture
def plain(tmp_path):
    model = tiny("llama3")  # grouped heads, scaled frequencies
    model.save_pretrained(tmp_path)
    return Oracle(model)


RANKS = [pytest.param({how: 2}, marks=pytest.mark.slow, id=how) for how in ("tensor_parallel", "pipeline_parallel")]


@pytest.fixture(params=[pytest.param({}, id="one process"), *RANKS])
def core(plain, tmp_path, request):
    options = EngineOptions.of(
        model=str(tmp_path), dtype="float32", kv_pages=100, page_size=4, max_model_len=100, max_batch_tokens=20,
        **request.param,
    )  # fmt: skip
    core = EngineCore(options, open_executor(options, resolve(str(tmp_path)).open(), vocabulary=None))
    yield core
    core.close()


def answer(core, order: list[int], recompute: float | None):
    """(log-probabilities of the first token by id, positions computed for it, prompt)."""
    prompt = HEAD + [token for c in order for token in CHUNKS[c]] + QUESTION
    chunks = [(len(HEAD) + i * 12, len(HEAD) + (i + 1) * 12) for i in range(len(order))]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=64, seed=0)
    blend = None if recompute is None else Blend(chunks, recompute)
    core.submit(Request(id="r", prompt=prompt, params=params, blend=blend))
    computed, events, submit = [], [], core.executor.submit

    def watched(plan):
        rows = [row for row in plan.rows if not row.token_mass]  # those look before anything is chosen
        computed.extend(p for row in rows for p in range(row.start, row.start + row.count))
        return submit(plan)

    core.executor.submit = watched
    while core.busy:
        events += core.step()
        core.scheduler.check()
    core.executor.submit = submit
    (event,) = events
    (first,) = event.logprobs
    return dict(zip(first.top_ids, first.top_logprobs, strict=True)), computed, prompt


def warm(core):
    for pair in PAIRS:
        answer(core, pair, 0.0)


def compare(found: dict[int, float], expected: torch.Tensor) -> None:
    ids = list(found)
    torch.testing.assert_close(torch.tensor(list(found.values())), expected[ids], atol=1e-4, rtol=0)


def test_nothing_recomputed_is_caches_joined_by_hand(plain, core):
    warm(core)
    order = [2, 0, 3, 1]
    found, computed, prompt = answer(core, order, 0.0)
    answer_only = list(range(len(prompt) - len(QUESTION), len(prompt)))
    assert computed == answer_only
    k, v = (torch.cat((x, torch.zeros_like(x[:, :, : len(QUESTION)])), 2) for x in plain.joined(order))
    expected = plain.after(prompt, k, v, answer_only)
    compare(found, expected)
    full = plain.after(prompt, *plain.cache(prompt), answer_only)
    assert (full - expected).abs().max() > 1e-2, "the oracle can tell a blended prompt from a whole one"


def test_some_recomputed_is_a_selective_pass(plain, core):
    warm(core)
    order = [3, 1, 0, 2]
    found, computed, prompt = answer(core, order, 0.4)
    assert len(computed) == len(QUESTION) + 15 and len(set(computed)) == len(computed)  # 40% of three chunks
    full = plain.cache(prompt)
    k, v = (torch.cat((x, torch.zeros_like(x[:, :, : len(QUESTION)])), 2) for x in plain.joined(order))
    for mine, true in ((k, full[0]), (v, full[1])):
        mine[:2] = true[:2]  # the probe leaves the first layers as they should be
    compare(found, plain.after(prompt, k, v, sorted(computed)))


def test_all_recomputed_is_the_whole_prompt(plain, core):
    warm(core)
    found, _, prompt = answer(core, [1, 3, 2, 0], 1.0)
    compare(found, plain.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach())
