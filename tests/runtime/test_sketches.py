"""What prepares captured steps: few layers that launch all, and leave everything alone that belongs to somebody."""

import json

import torch

from quire.assets import resolve
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.model import load_model
from quire.runtime.runner import ModelRunner
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
def test_nobodys_step_changes_nothing_of_anybodys(tmp_path):
    """Nor what a proposer is shown: sketches run side by side."""
    model = model_of(tmp_path, **LLAMA)
    capacity = Capacity(pages=20, slots=6, max_model_len=256, max_batch_tokens=128, depth=1)
    runner = ModelRunner(model, model.spec.kv_layout(page_size=16, dtype="float32"), capacity, CPU, None)
    runner._tap = HiddenStateTap((1, 3))
    shown = runner._tap.states
    runner._slots.tokens[:6], runner.pages[1:] = 7, 5
    captured = runner._captured
    for sketch in captured._sketches:
        for size in [(rows, rows) for rows, tokens in captured.sizes() if rows == tokens]:
            captured._step(sketch, *size, captured._nobodys(*size))
    for rehearsal in runner._rehearsals(runner._sketch):
        rehearsal()
    assert runner._tap.states is shown and (runner._slots.tokens[:6] == 7).all() and (runner.pages[1:] == 5).all()
    output = captured._step(captured._forward, 4, 4, captured._nobodys(4, 4))
    assert output.shown.shape == (4, 3 * 64) and not runner._tap.states, "nothing is kept for longer than its pass"
