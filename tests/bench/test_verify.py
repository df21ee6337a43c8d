"""Drawn tokens against a plain forward pass: right ones, wrong ones, and those that there is no memory for."""

import json
from types import SimpleNamespace

import pytest
import torch

from quire.assets import resolve
from quire.bench import suite_report, verify
from quire.bench.suite import Result
from quire.bench.workloads import Job
from quire.model import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99, "max_position_embeddings": 9000,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    source = resolve(str(folder)).open()
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, random_weights=True)
    return SimpleNamespace(model=model, layout=model.spec.kv_layout(page_size=16, dtype="float32"))


def greedy(executor, prompt, count):
    drawn = []
    for _ in range(count):
        logits = verify.sequence_logits(executor.model, executor.layout, [*prompt, *drawn], 1)
        drawn.append(int(logits.argmax()))
    return drawn


@torch.inference_mode()
def test_wrong_tokens_are_told_from_right_ones(executor, monkeypatch):
    prompt = list(range(20))
    right = greedy(executor, prompt, 3)
    wrong = [*right[:2], (right[2] + 1) % 99]
    stages = executor.model.stages
    found = verify.agreement(executor.model, executor.layout, [(prompt, right), (prompt, wrong)])
    assert (found.tokens, found.equal, found.unchecked) == (6, 5, 0) and found.worst > 0.01
    assert executor.model.stages is stages

    def full(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(verify, "sequence_logits", full)
    found = verify.agreement(executor.model, executor.layout, [(prompt, right)] * 2)
    assert (found.tokens, found.unchecked) == (0, 2) and executor.model.stages is stages


@torch.inference_mode()
@pytest.mark.parametrize("length", [64, 8192])
def test_prompts_of_every_length_are_checked(executor, monkeypatch, length):
    prompt = [i % 99 for i in range(length)]
    drawn = greedy(executor, prompt, 2)
    monkeypatch.setitem(suite_report.H200, "some", lambda: [Job(prompt, 2)] * 4)
    run = SimpleNamespace(traces=[SimpleNamespace(tokens=drawn)] * 4)
    anchors = {"vllm": 3.0, "sglang": 3.0, "floor": 1.0, "goal": 2.0}
    link = SimpleNamespace(core=SimpleNamespace(executor=executor))
    result = Result("some", 2.5, anchors, run, 1e14, 1e12)
    checked = suite_report.check(link, result, 2)
    assert (checked.tokens, checked.equal) == (4, 4)
    assert "ahead" in suite_report.line(result, checked) and "4/4 as plain" in suite_report.line(result, checked)
    none = verify.Agreement(unchecked=2)
    assert "0/0 as plain, no memory to check 2" in suite_report.line(result, none)
