"""Warm-up before capture: few layers launch all kernels, and change no slot but the null slot."""

import json

import torch

from quire.assets import resolve
from quire.kernels.library.cudnn_prefill import CudnnPrefill
from quire.model import load_model
from quire.runtime.worker import ForwardWorker
from quire.types.plan import Capacity

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 300, "max_position_embeddings": 256, "hidden_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
WINDOWED = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32,
    "max_window_layers": 2,
}  # fmt: skip


def model_of(folder, **config):
    (folder / "config.json").write_text(json.dumps(TINY | config))
    return load_model(resolve(str(folder)).open(), device=CPU, dtype=torch.float32, random_weights=True)


def test_one_layer_of_each_kind_and_the_last(tmp_path):
    llama = model_of(tmp_path, **LLAMA)
    assert [layer.index for layer in llama.sketch().layers] == [0, 5] and len(llama.layers) == 6
    llama.rescale_keys(2 ** torch.arange(6.0)[:, None, None].expand(6, 2, 16))
    assert [layer.index for layer in llama.sketch().layers] == [0, 5], "scales are no kind"
    assert [layer.index for layer in model_of(tmp_path, **WINDOWED).sketch().layers] == [0, 2, 5]
    assert [layer.index for layer in model_of(tmp_path, **LLAMA, num_hidden_layers=1).sketch().layers] == [0]


@torch.inference_mode()
def test_warm_up_changes_no_slot_but_the_null_slot(tmp_path):
    """Nor the hidden-state tap: warm-ups run side by side."""
    model = model_of(tmp_path, **LLAMA)
    capacity = Capacity(pages=20, slots=6, max_model_len=256, max_batch_tokens=128, depth=1)
    worker = ForwardWorker(model, model.spec.kv_layout(page_size=16, dtype="float32"), capacity, CPU)
    worker.tap_hidden_states((1, 3))
    tapped = worker._tap.states
    worker.slots.tokens[:6], worker.pages[1:] = 7, 5
    captured = worker._captured
    for warmup in captured._warmups:
        for size in [(rows, rows) for rows, tokens in captured.sizes() if rows == tokens]:
            captured._step(warmup, *size, captured._null_inputs(*size))
    for step in worker._warmups(worker._warmup_model):
        step()
    assert worker._tap.states is tapped and (worker.slots.tokens[:6] == 7).all() and (worker.pages[1:] == 5).all()
    output = captured._step(captured._forward, 4, 4, captured._null_inputs(4, 4))
    assert output.hidden.shape == (4, 3 * 64) and not worker._tap.states, "nothing is kept for longer than its pass"


@torch.inference_mode()
def test_attention_prepares_for_lengths_of_prompts_when_idle(tmp_path, monkeypatch):
    """For each that rows are padded to, once, in the null slot."""
    monkeypatch.setattr("quire.kernels.library.cudnn_prefill.ROUND", 32)
    model = model_of(tmp_path, **LLAMA)
    model.stages.backends = {kind: CudnnPrefill(each, long=50) for kind, each in model.stages.backends.items()}
    capacity = Capacity(pages=20, slots=6, max_model_len=256, max_batch_tokens=130, depth=1)
    worker = ForwardWorker(model, model.spec.kv_layout(page_size=16, dtype="float32"), capacity, CPU)
    worker.pages[1:] = 5
    met = []
    attention = worker._warmup_model.attention
    monkeypatch.setattr(
        worker._warmup_model, "attention", lambda batch, kv: (met.append(batch.counts), attention(batch, kv))
    )
    monkeypatch.setattr(worker._captured, "capture_next", iter([True, False, False, False, False]).__next__)
    assert [worker.prepare_next() for _ in range(4)] == [True, True, True, False]
    assert met == [[64], [96], [128]] and (worker.pages[1:] == 5).all()
