"""Between text and tokens: tokenizers, chat templates, incremental detokenization, stop strings, and what is in a
text: thoughts, calls of tools.

Knows: types, assets. Refuses to know: torch, engines, HTTP.
"""

from quire.text.call_formats.call_format import ToolFormat
from quire.text.chunks import chat_prompt, encode_chunks
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.stops import StopMatcher
from quire.text.template import ChatTemplate
from quire.text.text_model import TextModel, load_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.text.tool_reader import ToolReader
from quire.text.tool_spec import Tool
from quire.text.vocabulary import alphabet_of, vocabulary_of

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "TextModel",
    "Tokenizer",
    "Tool",
    "ToolFormat",
    "ToolReader",
    "alphabet_of",
    "chat_prompt",
    "encode_chunks",
    "load_tokenizer",
    "vocabulary_of",
]
