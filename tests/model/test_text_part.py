"""Multimodal checkpoints: the text part loads and answers as transformers does without pictures; the rest is left out,
and said so."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import run_model
from tiny_models import CONFIGS, SIZES, prompts
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from quire.assets import resolve
from quire.model import load_model

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def gemma3():
    vision = {**VISION, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    return Gemma3ForConditionalGeneration(config)


def mistral3(text: str):
    vision = {**VISION, "image_size": 28, "patch_size": 14, "head_dim": 8, "model_type": "pixtral"}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(vision_config=vision, text_config=CONFIGS[text]().to_dict(), image_token_index=96)
    )


def qwen35():
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 16,
    }
    text = CONFIGS["qwen3.5"]().to_dict()
    text["rope_parameters"] |= {"mrope_section": [2, 0, 0], "mrope_interleaved": True}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=96)
    )


def gemma4():
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
    text = CONFIGS["gemma4"]().to_dict()
    return Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=vision, audio_config=None, image_token_id=96)
    )


def llama4():
    vision = {**VISION, "image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16}
    text = CONFIGS["llama4"]().to_dict()
    return Llama4ForConditionalGeneration(
        Llama4Config(text_config=text, vision_config={**vision, "vision_output_dim": 16}, image_token_index=96)
    )


MODELS = {
    "gemma4": gemma4,
    "llama4": llama4,
    "qwen3.5": qwen35,
    "gemma3": gemma3,
    "mistral-small-3": lambda: mistral3("mistral-full"),
    "ministral-3": lambda: mistral3("ministral3"),
}


def tiny(name: str):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_text_answers_match_transformers(tmp_path, name):
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)
    (prompt,) = prompts(33, vocabulary=SIZES["vocab_size"] - 1)
    with torch.inference_mode():
        want = theirs(torch.tensor([prompt])).logits[0].float()
    torch.testing.assert_close(run_model(ours, [prompt], chunk=7)[0], want, atol=1e-4, rtol=1e-4)
    assert any("other modalities" in line for line in ours.describe())


def test_an_unknown_text_part_is_named(tmp_path):
    tiny("gemma3").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["model_type"] = "martian"
    file.write_text(json.dumps(config))
    with pytest.raises(Exception, match="'martian' is not supported"):
        load_model(resolve(str(tmp_path)).open(), device="cpu", dtype=torch.float32)
