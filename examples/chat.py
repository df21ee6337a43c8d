"""A conversation of two turns in this process, without a server: the second turn finds the first one's KV pages.

python examples/chat.py
"""

from quire import LLM, SamplingParams

with LLM("smollm2-135m", kv_memory="256M") as llm:
    greedy = SamplingParams(temperature=0, max_tokens=48)
    messages = [
        {"role": "system", "content": "You are a patient teacher. Answer in one or two sentences."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    first = llm.chat(messages, greedy)[0].outputs[0]
    print(first.text)

    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And at sunset?"},
    ]
    second = llm.chat(messages, greedy)[0].outputs[0]
    print(second.text)
    print(f"{second.cached_tokens} tokens of the second prompt were in the prefix cache")
