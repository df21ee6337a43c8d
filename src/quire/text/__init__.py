"""Between text and tokens: tokenizers, chat templates, incremental detokenization, stop strings.

Knows: types, assets. Refuses to know: torch, engines, HTTP.
"""

from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.model import TextModel, load_tokenizer
from quire.text.stops import StopMatcher
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.vocabulary import alphabet_of, vocabulary_of

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "TextModel",
    "Tokenizer",
    "alphabet_of",
    "load_tokenizer",
    "vocabulary_of",
]
