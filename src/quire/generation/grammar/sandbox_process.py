"""The process of the grammar sandbox: `python -m quire.generation.grammar.sandbox_process SECONDS`.

Whatever a grammar takes, this process alone has it to pay: the system ends it after so many seconds of computing over
one grammar, or when it asks for more memory than it may have. It ends by itself when its parent is gone.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from contextlib import suppress

import msgspec

from quire.generation.grammar.llguidance_backend import STACK, compile_grammar, make_tokenizer
from quire.generation.grammar.sandbox_client import Alphabet
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec, Vocabulary

MEMORY = 2 << 30  # bytes of address space, the stack among them


def vocabulary_of(alphabet: Alphabet) -> Vocabulary:
    single = {token[0]: i for i, token in enumerate(alphabet.tokens) if len(token) == 1 and i not in alphabet.special}
    return Vocabulary(
        tokens=alphabet.tokens,
        special=frozenset(alphabet.special),
        ends=alphabet.ends,
        encode=lambda text: [single[byte] for byte in text.encode()],
    )


def serve(seconds: float) -> None:
    questions = sys.stdin.buffer
    try:
        tokenizer = make_tokenizer(vocabulary_of(msgspec.json.decode(questions.readline(), type=Alphabet)))
    except ImportError as error:
        return say(f"grammars need the llguidance package: pip install llguidance ({error})")
    say("")
    for line in questions:
        answer = ""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            compile_grammar(msgspec.json.decode(line, type=GrammarSpec), tokenizer)
        except InputError as error:
            answer = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(answer)


def say(answer: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main(seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(limit, (most, most))
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve, args=(seconds,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(float(sys.argv[1]))
