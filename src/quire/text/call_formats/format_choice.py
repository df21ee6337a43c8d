"""Which tool-call format a model has: the one it is said to have, or the one whose marks its chat template knows."""

from __future__ import annotations

from quire.text.call_formats.call_format import ToolFormat
from quire.text.call_formats.deepseek_calls import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32
from quire.text.call_formats.gemma_calls import FUNCTION_GEMMA, GEMMA4
from quire.text.call_formats.glm_calls import GLM, GLM47
from quire.text.call_formats.harmony import HARMONY
from quire.text.call_formats.hermes_calls import HERMES
from quire.text.call_formats.json_list_calls import COHERE, GRANITE, NEMOTRON, PHI4
from quire.text.call_formats.kimi_calls import KIMI
from quire.text.call_formats.llama_calls import LLAMA3
from quire.text.call_formats.mistral_calls import MISTRAL, MISTRAL_ARGS
from quire.text.call_formats.python_calls import LFM2, OLMO3, PYTHONIC
from quire.text.call_formats.qwen_coder_calls import QWEN_CODER
from quire.types.errors import ConfigError

# In this order they are looked for in a template: those whose marks others share come before these.
_FORMATS: tuple[ToolFormat, ...] = (
    *(HARMONY, DEEPSEEK_V32, DEEPSEEK_V3, DEEPSEEK_V31, KIMI, QWEN_CODER, GLM47, GLM, GEMMA4, FUNCTION_GEMMA),
    *(COHERE, LFM2, NEMOTRON, PHI4, GRANITE, MISTRAL_ARGS, MISTRAL, OLMO3, HERMES, PYTHONIC, LLAMA3),
)
FORMATS = {format.name: format for format in _FORMATS}
_BY_NAME = FORMATS | {alias: format for format in _FORMATS for alias in format.aliases}


def choose_format(name: str, template: str) -> ToolFormat:
    """The format called `name`; `auto`: the one whose marks the template knows, else hermes."""
    if name == "auto":
        return next((format for format in _FORMATS if format.suits(template)), HERMES)
    if name not in _BY_NAME:
        raise ConfigError(f"no tool-call parser {name!r}; there are auto, {', '.join(sorted(_BY_NAME))}")
    found = _BY_NAME[name]
    return MISTRAL_ARGS if found is MISTRAL and MISTRAL_ARGS.suits(template) else found
