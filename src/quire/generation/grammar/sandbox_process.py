"""The process of the grammar sandbox: `python -m quire.generation.grammar.sandbox_process SECONDS`.

Whatever a grammar costs, this process alone pays: the system kills it after so many CPU seconds over one grammar, or
when it asks for more memory than its limit. It ends by itself when its parent is gone.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from contextlib import suppress

import msgspec

from quire.generation.grammar.llguidance_backend import STACK_BYTES, compile_grammar, make_tokenizer
from quire.generation.grammar.sandbox_client import SandboxVocabulary
from quire.types.errors import InputError, NotInstalledError
from quire.types.grammar import GrammarSpec, Vocabulary

MAX_ADDRESS_SPACE_BYTES = 2 << 30  # the stack included


def vocabulary_of(sent: SandboxVocabulary) -> Vocabulary:
    single = {token[0]: i for i, token in enumerate(sent.tokens) if len(token) == 1 and i not in sent.special}
    return Vocabulary(
        tokens=sent.tokens,
        special=frozenset(sent.special),
        ends=sent.ends,
        encode=lambda text: [single[byte] for byte in text.encode()],
    )


def serve(seconds: float) -> None:
    requests = sys.stdin.buffer
    try:
        tokenizer = make_tokenizer(vocabulary_of(msgspec.json.decode(requests.readline(), type=SandboxVocabulary)))
    except NotInstalledError as error:
        return reply(str(error))
    reply("")
    for line in requests:
        answer = ""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            compile_grammar(msgspec.json.decode(line, type=GrammarSpec), tokenizer)
        except InputError as error:
            answer = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(answer)


def reply(answer: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main(seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent
    for limit, most in ((resource.RLIMIT_AS, MAX_ADDRESS_SPACE_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(limit, (most, most))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(seconds,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(float(sys.argv[1]))
