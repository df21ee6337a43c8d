"""Families in the compiled CPU decoder under the engine: drawn tokens are the same alone, batched, chunked, preempted,
on a prefix hit, from a snapshot, with drafts. A row's bits do not depend on what is beside it: no near-ties."""

from __future__ import annotations

import pytest
from block_sized_models import CONFIGS
from tiny_engine import TOKENS, Engine, KnowingProposer
from tiny_models import filled, prompts

from quire.generation.drafting.speculation import Speculation
from quire.kernels import cpu
from quire.types.sampling_params import SamplingParams

QUICK = ("gemma2", "gpt-oss", "deepseek-v3", "qwen3.5-moe", "granite-hybrid", "lfm2")
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_draws_are_the_same_however_they_are_computed(tmp_path, name):
    if reason := cpu.available():
        pytest.skip(reason)
    filled(CONFIGS[name]()).save_pretrained(tmp_path)
    asked = prompts(33, 21, 40, 5)

    def engine(**options):
        made = Engine(tmp_path, **{"dtype": "auto", "threads": 2, "kv_pages": 400, "prefix_cache": False} | options)
        assert any("decoder: compiled" in reason for reason in made.core.executor.describe().reasons)
        return made

    plain = engine()
    wanted = [plain.answers([prompt], params=SEEDED)[0] for prompt in asked]
    assert len({tuple(answer) for answer in wanted}) == len(asked)
    assert plain.answers(asked, params=SEEDED) == wanted
    assert plain.answers(asked, params=SEEDED, preempt=5) == wanted
    assert plain.core.scheduler.stats.preemptions >= 4
    assert engine(prefill_chunk=7).answers(asked, params=SEEDED) == wanted
    cached = engine(prefix_cache=True)
    assert [cached.answers(asked, params=SEEDED) for _ in range(2)] == [wanted] * 2
    assert cached.core.scheduler.stats.cached_tokens >= 64
    guessing = engine(speculation="ngram", draft_tokens=4, draft_adapt=False)
    whole = [[*prompt, *answer] for prompt, answer in zip(asked, wanted, strict=True)]
    guessing.core.executor._head.speculate(Speculation(KnowingProposer(whole)))
    assert guessing.answers(asked, params=SEEDED) == wanted
    assert guessing.core.scheduler.stats.accepted_tokens > 20
