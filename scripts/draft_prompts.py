"""Prompts for `train_draft.py`: questions, stories, lists, comparisons, code, letters, edits, over some hundred topics.

None of the topics that `quire bench spec` asks about is among them. Refuses to know: models.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quire.bench.speculation_bench import edit

ASKS = (
    "Explain {} to a child.",
    "Explain {} in simple words.",
    "Write a short story about {}.",
    "Write a short poem about {}.",
    "What is interesting about {}?",
    "What do you know about {}?",
    "What is the history of {}?",
    "List five facts about {}.",
    "Give me ten ideas for a school project about {}.",
    "How did people come to know {}?",
    "Why do people like {}?",
    "Why are {} important?",
    "Tell me about {}.",
    "Describe {} in three sentences.",
    "Write a paragraph about {}.",
    "Write an introduction to an essay about {}.",
    "What are the advantages and disadvantages of {}?",
    "What would the world be like without {}?",
    "What questions should I ask an expert on {}?",
    "Summarize what science says about {}.",
    "Write a dialogue between two friends who talk about {}.",
    "Write a short speech about {}.",
    "I have to teach a class about {}. How should I begin?",
    "Make a table of contents for a book about {}.",
    "Write a quiz with five questions about {}, with answers.",
    "Give advice to somebody who wants to learn more about {}.",
    "Tell me a joke about {}.",
    "How do {} change with the seasons?",
)
PAIRS = (
    "What is the difference between {} and {}?",
    "Compare {} and {}.",
    "Write a short story about {} and {}.",
    "What do {} and {} have in common?",
    "Which would you choose, {} or {}, and why?",
    "Write a poem in which {} meet {}.",
    "Explain how {} could be related to {}.",
)
TOPICS = """
horses|apples|the ocean|gold|castles|dreams|snow|birds|cheese|ships|gardens|clouds|wheels|honey|silk|fire|mountains|fish
roses|clocks|kites|lamps|forests|dogs|cats|rice|tea|maps|money|sleep|hats|shoes|doors|windows|planets|sand|rain|thunder
islands|deserts|whales|spiders|farming|painting|dance|football|swimming|history|numbers|letters|stones|iron|copper
tigers|elephants|frogs|butterflies|onions|potatoes|lemons|grapes|sugar|pepper|soap|candles|bicycles|cars|planes|boats
roads|towers|schools|markets|libraries|hospitals|villages|cities|spring|summer|autumn|the night|the morning|friendship
courage|patience|laughter|memory|language|writing|cooking|sewing|volcanoes|earthquakes|the moon|the sun|gravity|magnets
electricity|light|shadows|mirrors|bridges|tunnels|canals|dams|mills|engines|robots|computers|telephones|radio|cameras
cinema|theatre|opera|guitars|violins|drums|songs|poetry|novels|fairy tales|myths|dragons|pirates|knights|kings
pyramids|temples|cathedrals|museums|statues|pottery|wood|cotton|wool|leather|steel|plastic|oil|coal|wind power|the sea
lakes|waterfalls|glaciers|caves|beaches|coral reefs|sharks|dolphins|penguins|eagles|owls|wolves|bears|foxes|rabbits|mice
ants|snails|snakes|turtles|crocodiles|dinosaurs|fossils|trees|flowers|mushrooms|moss|seeds|fruit|vegetables|soup|pasta
pizza|chocolate|ice cream|cakes|eggs|milk|butter|wine|juice|breakfast|dinner parties|restaurants|kitchens|furniture
houses|gates|fences|streets|parks|zoos|circuses|fairs|holidays|birthdays|weddings|families|neighbours|teachers|doctors
nurses|farmers|sailors|pilots|soldiers|artists|scientists|engineers|lawyers|judges|police|firefighters|carpenters
democracy|elections|laws|taxes|trade|banks|insurance|advertising|newspapers|television|the internet|video games|toys
puzzles|cards|running|tennis|skiing|climbing|sailing|hiking|camping|fishing|yoga|meditation|health|medicine|vaccines
teeth|eyes|hearts|bones|muscles|brains|emotions|happiness|sadness|anger|fear|hope|love|kindness|honesty|justice|freedom
peace|war|time|space|atoms|molecules|cells|genes|evolution|climate|weather|seasons|rainbows|storms|floods|droughts
recycling|pollution|energy|batteries|solar panels|satellites|rockets|telescopes|microscopes|mathematics|geometry|algebra
statistics|logic|philosophy|religion|psychology|economics|geography|chemistry|physics|biology|astronomy|archaeology
architecture|fashion|jewellery|perfume|umbrellas|bags|pens|books|dictionaries|alphabets|handwriting|translation|travel
hotels|airports|buses|subways|gardening|compost|pets|parrots|goldfish|hamsters|sheep|cows|pigs|goats|hens
"""
CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Write a C function that {}.",
    "Show me how to write a program that {} in Python, and explain it.",
    "Write a unit test for a Python function that {}.",
)
TASKS = """
reverses a string|adds two numbers|counts the words of a text|finds the largest number of a list|sorts a list of numbers
checks whether a number is prime|computes the factorial of a number|prints the first n Fibonacci numbers|sums a list
removes duplicates from a list|merges two sorted lists|searches a sorted list|counts the vowels of a string
checks whether a word is a palindrome|converts Celsius to Fahrenheit|reads a file line by line|writes a list to a file
parses a date|computes the average of a list|finds the longest word of a sentence|capitalizes every word|shuffles a list
flattens a list of lists|counts how often each letter occurs|generates a random password
computes the greatest common divisor|converts a number to binary|multiplies two matrices
transposes a matrix|checks whether two strings are anagrams|validates an email address|downloads a web page
draws a triangle of stars|plays rock, paper, scissors|guesses a number
"""
NEEDS = (
    "Write an email to my {0} to say that {1}.",
    "How do I tell my {0} that {1}?",
    "Write a short message to a {0}: {1}.",
    "My {0} asked me why {1}. What should I answer?",
)
PEOPLE = "boss|teacher|landlord|neighbour|colleague|doctor|brother|sister|mother|customer|coach|friend"
MATTERS = """
I will be late tomorrow|I am ill today|I need a day off|the meeting was moved to Friday|the package has not arrived
the heating does not work|I would like to learn to swim|I cannot come to the party|I am grateful for the help
the bill is wrong|I found a new job|the report is finished|I lost my keys|the car broke down
I want to move to another city|we should meet for lunch|the deadline is too early|I need more time|I made a mistake
"""
SENTENCES = """
The old man walked slowly to the market to buy fish.|She has been working at the hospital for twelve years.
The children were playing in the garden when it started to rain.|Our company wants to reduce its costs next year.
The ship left the harbour early in the morning.|He forgot his umbrella and came home completely wet.
Many people believe that the new law will not change anything.|The dog barked at the postman and ran away.
The museum is closed on Mondays and opens at ten on other days.|They built a small house near the lake.
The scientist explained her results to the students.|The soup was too hot, so we waited for a while.
"""
CHANGES = (
    "Rewrite this sentence in the past tense: {}",
    "Make this sentence longer: {}",
    "Make this more polite: {}",
    "Write three other ways to say this: {}",
    "Write this sentence again in capital letters: {}",
    "Correct the grammar, if it needs it: {}",
    "Continue the story: {}",
    "Turn this sentence into a question: {}",
)


def _parts(text: str) -> list[str]:
    return [part for line in text.strip().splitlines() for part in line.split("|")]


def topics() -> list[str]:
    return _parts(TOPICS)


def prompts(rng: Random, count: int, about: Sequence[str]) -> list[str]:
    """So many, all different, most of them about some of these topics; fewer, if there are no more."""
    kinds = (
        (12, lambda: rng.choice(ASKS).format(rng.choice(about))),
        (3, lambda: rng.choice(PAIRS).format(*rng.sample(about, 2))),
        (1, lambda: rng.choice(CODE).format(rng.choice(_parts(TASKS)))),
        (1, lambda: rng.choice(NEEDS).format(rng.choice(_parts(PEOPLE)), rng.choice(_parts(MATTERS)))),
        (1, lambda: rng.choice(CHANGES).format(rng.choice(_parts(SENTENCES)))),
        (1, lambda: edit(rng)),
    )
    weights, makers = zip(*kinds, strict=True)
    found: dict[str, None] = {}
    for _ in range(10 * count):
        if len(found) == count:
            break
        found[rng.choices(makers, weights)[0]()] = None
    return list(found)
