"""Forty prompts of different kinds and lengths."""

QUESTIONS = [
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a haiku about the sea.",
    "List three uses of copper.",
    "Why do leaves change colour in autumn?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet, and when?",
    "Summarise the plot of Cinderella in two sentences.",
    "What is 17 times 3?",
    "Name a mammal that lays eggs.",
    "Give me a recipe for pancakes.",
    "How does a bicycle stay upright?",
]
BEGINNINGS = [
    "The quick brown fox",
    "Once upon a time, in a village by the river,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    '{"name": "Ada", "born": ',
    "1, 1, 2, 3, 5, 8,",
    "It was the best of times,",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "Größe und Gewicht: ",
    "日本の首都は",
    "Water boils at",
    "In 1969,",
    "The three laws of thermodynamics are:\n1.",
    "<html>\n<body>\n",
    "Q: How many legs does a spider have?\nA:",
    "To be, or not to be,",
    "Step 1: Preheat the oven",
    "The main difference between TCP and UDP is",
    "a",
    " ",
    "\n\n",
    "🙂",
]
LONG = [(" ".join(BEGINNINGS[i % len(BEGINNINGS)] for i in range(k))) for k in (9, 14, 23, 40)]


def forty(llm):
    """Token ids: chats through the model's template, raw beginnings, and a few long texts."""
    chats = [llm.text.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    texts = [llm.text.tokenizer.encode(t) for t in BEGINNINGS + LONG]
    prompts = chats + texts
    assert len(prompts) == 40
    return prompts
