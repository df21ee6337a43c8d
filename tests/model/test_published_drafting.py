"""Published draft heads under the engine: greedy answers with them are those without, on 50 prompts."""

from __future__ import annotations

import pytest
import transformers as hf
from published_head_writer import HIDDEN, VOCAB, write_eagle, write_medusa
from tiny_engine import Engine
from tiny_models import SIZES, filled, prompts

ASKED = prompts(*[3 + i % 23 for i in range(50)], vocabulary=VOCAB)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 8}
    config = hf.LlamaConfig(**SIZES | sizes, head_dim=32)
    filled(config, 0).save_pretrained(root / "model")
    write_eagle(root / "eagle")
    write_medusa(root / "medusa")
    return root


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "auto"])
def test_answers_are_those_without_drafts(files, dtype):
    options = {"dtype": dtype, "kv_pages": 400, "max_seqs": 8}
    plain = Engine(files / "model", **options)
    assert ("compiled" in " ".join(plain.core.executor.describe().reasons)) == (dtype == "auto")
    wanted = plain.answers(ASKED)
    for kind in ("eagle", "medusa"):
        drafting = Engine(files / "model", speculation=f"{kind}:{files / kind}", draft_adapt=False, **options)
        assert drafting.answers(ASKED) == wanted
        assert drafting.core.scheduler.stats.drafted_tokens > 500
