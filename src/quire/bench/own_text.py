"""A calibration text that a model writes itself: what its layers see of it is what they see in use, and nothing has to
be fetched. Half of the samples go on from a random token (Liu et al. 2023: LLM-QAT), half answer a chat message.

Refuses to know: what is calibrated with it.
"""

from __future__ import annotations

import random

from quire.engine.llm import LLM
from quire.types.sampling_params import SamplingParams

ASKED = (
    "Explain how photosynthesis works.",
    "Write a short story about a lighthouse keeper.",
    "What were the causes of the First World War?",
    "Give me a recipe for vegetable soup.",
    "Write a Python function that sorts a list of names by length.",
    "Compare renting and buying a house.",
    "How do vaccines protect people from disease?",
    "Plan a three-day trip to Lisbon.",
    "Write a polite email that asks for more time.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Show your work.",
    "Return a JSON object with the name, the age and the hobbies of an invented person.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Translate 'Where is the station?' into French, Spanish and German.",
    "List ten ideas for a birthday present.",
    "Explain supply and demand with an example.",
    "Write a bash command that finds the largest files of a folder, and explain it.",
)


def own_text(llm: LLM, samples: int, window: int, seed: int = 1) -> list[list[int]]:
    """So many samples of `window` tokens."""
    draw, text = random.Random(seed), llm.text
    ordinary = [i for i in range(llm.info.vocab_size) if i not in text.tokenizer.special_ids]
    begin = [] if text.tokenizer.bos_id is None else [text.tokenizer.bos_id]
    prompts = [
        text.encode_chat([{"role": "user", "content": draw.choice(ASKED)}])[: window // 2]
        if number % 2
        else [*begin, draw.choice(ordinary)]
        for number in range(samples)
    ]
    params = [
        SamplingParams(max_tokens=window - len(prompt), seed=seed * samples + number, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    answers = llm.generate(prompts, params)
    return [prompt + list(answer.outputs[0].token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
