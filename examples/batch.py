"""Many prompts at once, in this process: they share steps, and answers come in the order of the prompts.

    python examples/batch.py

For a file of OpenAI requests there is `quire batch IN OUT`.
"""

from time import perf_counter

from quire import LLM, SamplingParams

countries = ["France", "Italy", "Spain", "Japan", "Egypt", "Norway", "Peru", "Kenya"]
prompts = [f"The capital of {country} is" for country in countries]

with LLM("smollm2-135m", kv_memory="256M") as llm:
    begun = perf_counter()
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, stop=["."]))
    seconds = perf_counter() - begun
    for country, result in zip(countries, results, strict=True):
        print(f"{country}:{result.outputs[0].text}")
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    print(f"{len(results)} answers, {tokens} tokens, {tokens / seconds:.0f} tokens a second")
