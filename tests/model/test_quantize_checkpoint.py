"""Calibrated quantisation: what is written means what was meant, in this reader and in others'."""

from __future__ import annotations

import json

import pytest
import torch
from block_sized_models import CONFIGS
from model_harness import run_model
from safetensors.torch import load_file
from tiny_models import filled, prompts, their_logits, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from typer.testing import CliRunner

from quire.assets import resolve
from quire.cli.main import app
from quire.model import CompiledModel, load_model
from quire.model.calibration import weight_rounding as rounding
from quire.model.calibration.quantize_checkpoint import quantize_checkpoint
from quire.model.calibration.recipe import SCHEMES, Recipe
from quire.model.quantization.fp8 import Fp8Scheme
from quire.types.errors import ConfigError

SAMPLES = prompts(*[48] * 12, seed=5)
EXPERTS = ("qwen2-moe", "qwen3-moe", "mixtral", "glm4-moe")
GRID = rounding.Grid(4, symmetric=False, group=32, scale_dtype=torch.bfloat16)


def quantised(tmp_path, name, recipe, seed=0):
    """The model, and where its quantised form lies."""
    theirs = filled(CONFIGS[name](), seed) if name in EXPERTS else tiny(name, seed)
    theirs.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    model, out = resolve(str(tmp_path / "plain")), tmp_path / "out"
    seen = []
    report = quantize_checkpoint(
        model.open(), model.path, out, recipe, SAMPLES, progress=lambda done, of: seen.append((done, of))
    )
    assert seen == [(i + 1, report.layers) for i in range(report.layers)]
    return theirs, out, report


def logits_of(path, **options):
    (prompt,) = prompts(33)
    ours = load_model(resolve(str(path)).open(), device="cpu", dtype=torch.float32, **options)
    kv = {"kv_dtype": "float16"} if isinstance(ours, CompiledModel) else {}
    return run_model(ours, [prompt], **kv)[0]


def distance(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_stay_near(tmp_path, scheme):
    theirs, out, report = quantised(tmp_path, "block-sized", Recipe(scheme, group_size=32))
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    near = {"awq": 0.45, "gptq": 0.45, "smoothquant": 0.05, "fp8": 0.2}[scheme]
    assert distance(logits_of(out), want) < near
    assert distance(logits_of(out, compiled=1), want) < near + 0.05
    assert report.matrices == 7 * report.layers and (out / "tokenizer.json").exists()
    stored = load_file(out / "model.safetensors")
    assert report.written_bytes == sum(tensor.nbytes for tensor in stored.values()) < report.source_bytes
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_calibrated_one_by_one_and_what_chooses_them_stays(tmp_path, name, scheme):
    theirs, out, report = quantised(tmp_path, name, Recipe(scheme, group_size=32))
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    near = {"awq": 0.5, "gptq": 0.5, "smoothquant": 0.15, "fp8": 0.25}[scheme]  # a token may get another expert
    assert distance(logits_of(out), want) < near
    assert distance(logits_of(out, compiled=1), want) < near + 0.1
    stored = load_file(out / "model.safetensors")
    ignored = set(json.loads((out / "config.json").read_text())["quantization_config"]["ignore"])
    plain = {
        key.removesuffix(".weight") for key, tensor in stored.items() if key.endswith("weight") and tensor.dim() == 2
    }
    plain -= {"model.embed_tokens", *(key.removesuffix("_scale") for key in stored)}
    routers = {key for key in plain if key.endswith((".gate", ".shared_expert_gate"))}
    assert routers and routers <= ignored
    assert not [key for key in ignored if "experts." in key]
    assert report.matrices == sum(key.endswith("weight_scale") for key in stored)


def test_gptq_beats_nearest_for_experts(tmp_path):
    """Of what they see, which is not what the others do."""
    theirs, out, _ = quantised(tmp_path, "qwen3-moe", Recipe("gptq", group_size=32))
    (prompt,) = prompts(33)
    want = their_logits(theirs, prompt)
    nearest = logits_of(tmp_path / "plain", compiled=1, quantize="int4")
    assert distance(logits_of(out, compiled=1), want) < distance(nearest, want)


@pytest.mark.parametrize(
    "name", ["block-sized", "llama-biased-tied", "qwen2", "gemma2", "phi3", "cohere2", "olmo2", *EXPERTS]
)
@pytest.mark.parametrize("scheme", ["awq", "smoothquant"])
def test_folded_scales_leave_the_function_as_it_is(tmp_path, monkeypatch, name, scheme):
    """With all matrices kept, only scales move: between norms and matrices, values and o, up and down."""
    monkeypatch.setattr("quire.model.calibration.recipe.GROUPS", (16,))  # which divides the columns of all
    theirs, out, report = quantised(tmp_path, name, Recipe(scheme, group_size=16, keep="."))
    assert report.matrices == 0
    (prompt,) = prompts(33)
    torch.testing.assert_close(logits_of(out), their_logits(theirs, prompt), atol=2e-4, rtol=2e-4)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "plain", out))
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert moved or (name, scheme) == ("olmo2", "smoothquant")  # whose norms come after


def test_some_modules_stay(tmp_path):
    theirs, out, report = quantised(tmp_path, "block-sized", Recipe("gptq", group_size=32, keep="down_proj|layers.0."))
    stored = load_file(out / "model.safetensors")
    assert report.matrices == 6 * (report.layers - 1)
    before = load_file(tmp_path / "plain" / "model.safetensors")
    kept = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(stored[kept], before[kept]) and "model.layers.1.mlp.up_proj.weight_packed" in stored
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored and "model.layers.1.mlp.down_proj" in ignored
    (prompt,) = prompts(33)
    assert distance(logits_of(out), their_logits(theirs, prompt)) < 0.3


@pytest.mark.parametrize(
    "recipe",
    [*(Recipe(scheme, group_size=32) for scheme in SCHEMES), Recipe("gptq", group_size=32, act_order=True)],
    ids=[*SCHEMES, "gptq-act-order"],
)
def test_the_compressed_tensors_package_reads_the_same(tmp_path, recipe):
    pytest.importorskip("compressed_tensors", reason="the library that reads this format elsewhere")
    _, out, _ = quantised(tmp_path, "block-sized", recipe)
    shifted = recipe.scheme in ("awq", "gptq")  # with zero points: transformers 5.23 needs one group size
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if shifted else {}
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **how)
    (prompt,) = prompts(33)
    want, got = their_logits(theirs, prompt), logits_of(out)
    if shifted:
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    else:  # whose activations they round too
        assert distance(got, want) < 0.2
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize("own", [False, True], ids=["of a file", "its own text"])
def test_the_command_reports_what_it_costs(tmp_path, own):
    tiny("block-sized").save_pretrained(tmp_path / "plain")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:97]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "plain" / "tokenizer.json"))
    (tmp_path / "text").write_text("What is gravity? It pulls. " * 60)
    words = ["quantize", str(tmp_path / "plain"), "--scheme", "smoothquant"]
    words += ["--samples", "6", "--eval-windows", "3"] if own else ["--text", str(tmp_path / "text")]
    words += ["--out", str(tmp_path / "out"), "--window", "48", "--device", "cpu", "--json", str(tmp_path / "figures")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "layer 4 of 4" in done.output
    assert ("the model writes 9 samples of 48 tokens" in done.output) == own
    figures = json.loads((tmp_path / "figures").read_text())
    found = figures["perplexity"]
    assert found["after"] == pytest.approx(found["before"], rel=0.1)
    assert found["as served"] == pytest.approx(found["before"], rel=0.1)
    assert f"perplexity before: {found['before']:.4f}" in done.output
    assert figures["stored_bytes"] < figures["source_bytes"] / 2


@pytest.fixture(scope="module")
def correlated():
    """Weights, and inputs that go together."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(64, 64, generator=generator) * torch.logspace(0, -1.5, 64)
    x = torch.randn(512, 64, generator=generator) @ mixing
    return torch.randn(48, 64, generator=generator), x, x.t() @ x


def cost(rounded, weight, x):
    return (x @ (rounded.dense() - weight).t()).norm().item()


def test_gptq_and_clipping_err_less_than_the_nearest(correlated):
    weight, x, gram = correlated
    plain = cost(rounding.nearest(weight, GRID), weight, x)
    assert cost(rounding.clipped(weight, gram, GRID), weight, x) < plain
    in_turn = cost(rounding.gptq(weight, gram, GRID, act_order=False), weight, x)
    ordered = cost(rounding.gptq(weight, gram, GRID, act_order=True), weight, x)
    assert in_turn < 0.7 * plain and ordered < 0.7 * plain


def test_8_bit_floats_lose_least_where_inputs_are_large():
    generator = torch.Generator().manual_seed(0)
    weight, matter = torch.randn(64, 128, generator=generator), torch.ones(128)
    matter[[3, 77]] = 300

    def loses(rounded):
        return ((rounded.dense() - weight).square() @ matter).sum()

    told, plain = (rounding.nearest_fp8(weight, torch.bfloat16, known) for known in (matter, None))
    assert loses(told) < 0.6 * loses(plain)
    eight = Fp8Scheme()
    state = eight.create(64, 128, torch.device("cpu"), torch.bfloat16)
    eight.put(state, 0, told.dense().bfloat16())  # a checkpoint of such rows stays what it is
    torch.testing.assert_close(state["weight"].float() * state["scale"][:, None], told.dense(), rtol=1e-2, atol=0)


def test_gptq_without_correlation_is_the_nearest(correlated):
    """Within the ranges that cost least."""
    weight, _, _ = correlated
    for act_order in (False, True):
        rounded = rounding.gptq(weight, torch.eye(64), GRID, act_order=act_order)
        assert torch.equal(rounded.dense(), rounding.clipped(weight, torch.eye(64), GRID).dense())


def test_gptq_sees_what_rounded_matrices_make(tmp_path, monkeypatch):
    """With queries, keys and values rounded to nothing, attention hands on nothing to the next matrix."""
    grams = []

    def to_nothing(weight, gram, grid, *, act_order):
        grams.append(gram)
        return rounding.nearest(torch.zeros_like(weight), grid)

    monkeypatch.setattr(rounding, "gptq", to_nothing)
    quantised(tmp_path, "block-sized", Recipe("gptq", group_size=32))
    qkv, o, up, down = (gram.abs().max().item() for gram in grams[:4])
    assert qkv > 0 and o < 1e-12 and up > 0 and down < 1e-12


def test_inputs_that_never_were_cost_nothing(correlated):
    weight, x, _ = correlated
    x = x.clone()
    x[:, 7] = 0
    rounded = rounding.gptq(weight, x.t() @ x, GRID, act_order=False)
    assert rounded.dense().isfinite().all()


@pytest.mark.parametrize(
    ("name", "match"), [("gpt2", "rotary"), ("deepseek-v3", "or experts"), ("granite-moe", "holds several matrices")]
)
def test_what_is_not_calibrated_here_says_so(tmp_path, name, match):
    with pytest.raises(ConfigError, match=match):
        quantised(tmp_path, name, Recipe("gptq"))
    assert not (tmp_path / "out").exists()


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    _, out, _ = quantised(tmp_path, "block-sized", Recipe("fp8"))
    model = resolve(str(out))
    with pytest.raises(ConfigError, match="quantised already"):
        quantize_checkpoint(model.open(), model.path, tmp_path / "again", Recipe("gptq"), SAMPLES)
    with pytest.raises(ConfigError, match="nothing to calibrate with"):
        plain = resolve(str(tmp_path / "plain"))
        quantize_checkpoint(plain.open(), plain.path, tmp_path / "again", Recipe("gptq"), [])
    with pytest.raises(ConfigError, match="not an empty folder"):
        plain = resolve(str(tmp_path / "plain"))
        quantize_checkpoint(plain.open(), plain.path, out, Recipe("gptq"), SAMPLES)


def test_what_fails_leaves_nothing_behind(tmp_path):
    def stop(done, of):
        raise KeyboardInterrupt

    tiny("block-sized").save_pretrained(tmp_path / "plain")
    model = resolve(str(tmp_path / "plain"))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(model.open(), model.path, tmp_path / "out", Recipe("fp8"), SAMPLES, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_shards_are_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.model.calibration.checkpoint_writer.SHARD_BYTES", 20_000)
    _, out, report = quantised(tmp_path, "block-sized", Recipe("smoothquant"))
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == (
        report.written_bytes
    )
    assert logits_of(out).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"scheme": "rtn"}, "awq, gptq"),
        ({"scheme": "awq", "group_size": 48}, "group_size 48"),
        ({"scheme": "awq", "act_order": True}, "act_order is for gptq"),
        ({"scheme": "smoothquant", "alpha": 2.0}, "alpha"),
        ({"scheme": "fp8", "keep": "("}, "not a pattern"),
    ],
)
def test_recipes_that_do_not_work_out(fields, match):
    with pytest.raises(ConfigError, match=match):
        Recipe(**fields)
