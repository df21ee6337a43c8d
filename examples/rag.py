"""Retrieval with chunks that are shared: the KV of a document is computed twice at most, for where it comes first and
for where others come before it, and reused wherever it stands.

    python examples/rag.py

A prefix cache would miss here: the second question finds the same documents in another order. Blending is an
approximation; docs/memory.md says what it costs.
"""

from quire import LLM, BlendParams, SamplingParams

DOCUMENTS = {
    "lighthouse": "The lighthouse of Harrow Point was built in 1871 by the engineer Ada Brennan. It is 41 metres high, "
    "stands on a reef of basalt two miles from the shore, and was the first on this coast to burn paraffin. ",
    "ferry": "The ferry to Harrow Point leaves from the old pier on weekdays at nine and noon. It takes forty minutes. "
    "In winter, from November to March, it runs on Saturdays only, and never when the wind is above force six. ",
    "museum": "The museum in the keeper's house shows the first lens, and the log books of six keepers. "
    "It is open whenever the ferry runs; tickets cost four pounds, and children under twelve enter without one. ",
}
SEPARATOR = "<chunk>"


def retrieve(question: str) -> list[str]:
    """By words in common, the best last, where models read most attentively."""
    words = {word.strip("?.,").lower() for word in question.split()}
    return sorted(DOCUMENTS, key=lambda name: len(words & set(DOCUMENTS[name].lower().split())))


with LLM("smollm2-135m", kv_memory="256M") as llm:
    for question in ("Who was the engineer of the lighthouse?", "What do tickets for the museum cost?"):
        found = retrieve(question)
        parts = ["Answer from these documents.\n", *(DOCUMENTS[name] for name in found), f"\nQuestion: {question}"]
        messages = [{"role": "user", "content": SEPARATOR.join(parts)}]
        greedy, blend = SamplingParams(temperature=0, max_tokens=32), BlendParams(separator=SEPARATOR, recompute=0.15)
        (result,) = llm.chat(messages, greedy, blend=blend)
        output = result.outputs[0]
        print(f"{question} ({', '.join(found)})\n{output.text}")
        print(f"{output.blended_tokens} tokens reused at another place")
