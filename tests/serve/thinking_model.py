"""A tiny random model that thinks: its chat template opens a thought, or closes it where thinking is switched off."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from quire.text.token_bytes import BYTE_ALPHABET

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif not bare %}<think>\n{% endif %}{% endif %}"
    "{% if tools %}{# <tool_call> #}{% endif %}"
)


def make(path: Path, seed: int = 7) -> Path:
    spelled = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(spelled)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.token_to_id("<|im_end|>"), initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return path
