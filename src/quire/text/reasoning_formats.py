"""How models mark thoughts before an answer, as data, and which way a chat template suggests.

Refuses to know: how the text is read (`reasoning_reader`, `call_formats/harmony`).
"""

from __future__ import annotations

from typing import NamedTuple

from quire.text.call_formats import harmony
from quire.types.errors import ConfigError


class ReasoningFormat(NamedTuple):
    name: str
    opens: tuple[str, ...]  # any of these begins a thought; the first is what a model writes
    closes: tuple[str, ...]  # any of these ends it
    drops: tuple[str, ...] = ()  # marks in an answer that say nothing
    sign: str = ""  # what a template with this format has in it, if not the first of `closes`
    gap: bool = True  # white space may follow a thought
    aliases: tuple[str, ...] = ()  # what vLLM and SGLang call it, or models that mark thoughts the same way

    @property
    def open(self) -> str:
        return self.opens[0]

    @property
    def close(self) -> str:
        return self.closes[0]

    def marks(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, *self.drops)

    def ends_inside(self, prompt: str) -> bool:
        """Whether a prompt that ends so has begun a thought."""
        return prompt.rstrip().endswith(self.opens)

    def ends_behind(self, prompt: str) -> bool:
        """Whether it has ended one: no other follows."""
        return prompt.rstrip().endswith(self.closes)


THINK = ReasoningFormat(
    "think",
    ("<think>",),
    ("</think>",),
    aliases=(
        *("deepseek_r1", "deepseek_v3", "deepseek-r1", "deepseek-v3", "qwen3", "qwen3-thinking", "glm45", "kimi_k2"),
        *("minimax_m2", "nemotron", "olmo3", "smollm3", "step3", "ernie45", "holo2"),
    ),
)
GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"),
    drops=("<response>", "</response>"),
    sign="Here is my thought process:",
)
MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), aliases=("magistral",))
HARMONY = ReasoningFormat(
    "harmony",
    (harmony.ANALYSIS,),
    (harmony.NEXT,),
    sign=f"{harmony.CHANNEL}analysis",
    gap=False,
    aliases=("openai_gptoss", "gpt-oss"),
)
FORMATS = {
    one.name: one
    for one in (
        HARMONY,
        GRANITE._replace(name="granite_response", opens=("<think>",), closes=("</think>",), sign="<response>"),
        GRANITE,
        MISTRAL,
        ReasoningFormat(
            "cohere2",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            aliases=("cohere_command3",),
        ),
        ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",)),
        ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
        ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",)),
        THINK,
    )
}
_BY_NAME = FORMATS | {alias: one for one in FORMATS.values() for alias in one.aliases}


def choose_reasoning(name: str, template: str) -> ReasoningFormat | None:
    """The format called `name`; `auto`: the one whose marks the template knows; none of them: None."""
    if name == "none":
        return None
    if name == "auto":
        return next((one for one in FORMATS.values() if (one.sign or one.close) in template), None)
    if name not in _BY_NAME:
        raise ConfigError(f"no reasoning parser {name!r}; there are auto, none, {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]
