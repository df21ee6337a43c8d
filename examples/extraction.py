"""Structured extraction: answers that keep to a JSON schema, whatever the model would rather say.

python examples/extraction.py
"""

import json

from quire import LLM, GrammarSpec, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 30},
        "product": {"enum": ["kettle", "toaster", "lamp"]},
        "broken": {"type": "boolean"},
        "days_owned": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["customer", "product", "broken", "days_owned"],
    "additionalProperties": False,
}
LETTERS = [
    "Dear Sir, the kettle I bought 12 days ago leaks. Please send another. Maria Lopez",
    "Hello! Just to say how much we like our lamp, after 200 days it is as bright as ever. Tom Berg",
]

with LLM("smollm2-135m", kv_memory="256M") as llm:
    params = SamplingParams(temperature=0, max_tokens=96, grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)))
    asked = "Extract the facts of this letter as JSON.\n\n"
    for result in llm.chat([[{"role": "user", "content": asked + letter}] for letter in LETTERS], params):
        facts = json.loads(result.outputs[0].text)
        state = "broken" if facts["broken"] else "fine"
        print(f"{facts['customer']}: {facts['product']}, {state}, {facts['days_owned']}")
