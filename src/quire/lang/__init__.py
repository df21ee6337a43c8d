"""A language for programs over a model: prompts as values, holes the model fills, control flow in plain Python.

    with Model("smollm2-135m") as model:
        prompt = model + user("Name a city in Italy.") + gen("city", where=Words(1, 3))
        print(prompt["city"])

Knows: text, the client side of the engine. Refuses to know: torch, scheduling, how servers are made.
"""

from quire.lang.conversations import Conversations
from quire.lang.documents import map_reduce
from quire.lang.model import Model
from quire.lang.optimise import Example, Task, bootstrap, evaluate
from quire.lang.pieces import assistant, chunk, gen, join, select, system, user
from quire.lang.prompt import Forks, Prompt, probabilities
from quire.lang.reasoning import chain_of_thought, self_consistency, tree_of_thoughts
from quire.lang.tools import react
from quire.lang.where import Contains, EndsWith, Int, Length, OneOf, Regex, StartsWith, StopsAt, Where, Words

__all__ = [
    "Contains",
    "Conversations",
    "EndsWith",
    "Example",
    "Forks",
    "Int",
    "Length",
    "Model",
    "OneOf",
    "Prompt",
    "Regex",
    "StartsWith",
    "StopsAt",
    "Task",
    "Where",
    "Words",
    "assistant",
    "bootstrap",
    "chain_of_thought",
    "chunk",
    "evaluate",
    "gen",
    "join",
    "map_reduce",
    "probabilities",
    "react",
    "select",
    "self_consistency",
    "system",
    "tree_of_thoughts",
    "user",
]
