"""A conversation with a model in the terminal: messages, sampling parameters, answers as they stream.

Refuses to know: where lines come from.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.cli.terminal_markdown import TerminalMarkdown
from quire.text.segments import Said, Thought
from quire.types.errors import InputError
from quire.types.outputs import Delta
from quire.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM

# What /set takes, beside what the terminal shows: by the names of the API, and Ollama's where those differ.
PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop",
)  # fmt: skip
OLLAMA_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


class ChatSession:
    """`markdown`: show it as such, on a terminal; else text goes out as it comes."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str = "", verbose: bool = False, markdown: bool):
        self.llm = llm
        self.params = params
        self.system = system
        self.verbose = verbose
        self.markdown = markdown
        self.thoughts: bool | None = None  # whether to think, where the template asks; None: as it likes
        self.messages: list[dict[str, Any]] = []

    def ask(self, question: str) -> None:
        """Answer a question and keep both; a question that is refused is not kept."""
        self.messages.append({"role": "user", "content": question})
        try:
            self._answer()
        except BaseException:
            self.messages.pop()
            raise

    def regenerate(self) -> None:
        """Answer the last question again."""
        if not any(message["role"] == "user" for message in self.messages):
            raise InputError("there is no question to answer again yet")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        self._answer()

    def _answer(self) -> None:
        told = [{"role": "system", "content": self.system}] if self.system else []
        variables: dict[str, Any] = {} if self.thoughts is None else {"enable_thinking": self.thoughts}
        text = self.llm.text
        prompt = text.encode_chat([*told, *self.messages], **variables)
        reader, params = text.answer_reader(prompt, {}), self.params
        if reader is not None and text.hidden_marks(False):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        said: list[str] = []
        timing = Timing(len(prompt))
        with _terminal(self.markdown) as show:
            try:
                for delta in self._deltas(prompt, params):
                    timing.take(delta)
                    for segment in reader.push(delta.text) if reader else [Said(delta.text)]:
                        show(segment, said)
                for segment in reader.end() if reader else ():
                    show(segment, said)
            except KeyboardInterrupt:
                timing.stopped = True  # this answer; the conversation goes on
        if self.verbose:
            timing.report()
        self.messages.append({"role": "assistant", "content": "".join(said)})

    def _deltas(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        """What the model writes; until its first token, a sign that it is at work."""
        from rich.console import Console

        deltas = self.llm.stream(prompt, params)
        with Console(stderr=True).status(f"reading {len(prompt):,} tokens", spinner="dots"):
            first = next(deltas, None)
        if first is not None:
            yield first
            yield from deltas

    def set(self, name: str, value: str) -> None:
        """Change one sampling parameter; raises InputError where there is none such, or it does not take that."""
        name = OLLAMA_NAMES.get(name, name)
        if name not in PARAMETERS:
            raise InputError(f"there is no parameter {name!r}; there are {', '.join(PARAMETERS)}")
        current: Any = msgspec.structs.asdict(self.params)
        try:
            given = [value] if name == "stop" else None if value.lower() in ("none", "off") else json.loads(value)
            self.params = msgspec.convert(current | {name: given}, SamplingParams)
        except json.JSONDecodeError:
            raise InputError(f"{name} does not take {value!r}: it wants a number") from None
        except (ValueError, TypeError) as error:
            raise InputError(f"{name} does not take {value!r}: {str(error).splitlines()[0]}") from None
        except RecursionError:
            raise InputError(f"{name} does not take that") from None

    def parameters(self) -> dict[str, Any]:
        """Those that differ from what a request has that says nothing."""
        unsaid = SamplingParams()
        return {
            name: value
            for name in PARAMETERS
            if (value := getattr(self.params, name)) != getattr(unsaid, name) or name == "temperature"
        }

    def save(self, path: Path) -> None:
        kept = {
            "model": self.llm.info.model, "system": self.system, "parameters": self.parameters(),
            "messages": self.messages,
        }  # fmt: skip
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            scratch.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(scratch, path)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is no saved conversation: {error}") from None
        for name, value in kept.parameters.items():
            for one in value if isinstance(value, list) else [value]:
                self.set(name, one if isinstance(one, str) else json.dumps(one))
        self.system, self.messages = kept.system, [msgspec.structs.asdict(message) for message in kept.messages]


class SavedMessage(msgspec.Struct):
    role: str
    content: str


class SavedChat(msgspec.Struct):
    messages: list[SavedMessage]
    system: str = ""
    parameters: dict[str, Any] = {}


class Timing:
    """Of one answer: when its tokens came."""

    def __init__(self, prompt: int):
        self.prompt = prompt
        self.cached = 0
        self.tokens = 0
        self.stopped = False
        self._began = time.perf_counter()
        self._first = self._last = 0.0

    def take(self, delta: Delta) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.tokens += len(delta.token_ids)
        self.cached = max(self.cached, delta.cached_tokens)

    def report(self) -> None:
        to_first, after = self._first - self._began, self._last - self._first
        rate = (self.tokens - 1) / after if self.tokens > 1 and after > 0 else 0.0
        cached = f" ({self.cached} cached)" if self.cached else ""
        print(
            f"\nprompt {self.prompt} tokens{cached}, first token after {to_first:.2f} s; "
            f"answer {self.tokens} tokens, {rate:.1f} tok/s{'; stopped' if self.stopped else ''}",
            file=sys.stderr,
        )


@contextmanager
def _terminal(markdown: bool) -> Iterator[Callable[[Any, list[str]], None]]:
    """Shows segments as they come; what is said is kept. Words are wrapped on a terminal only."""
    out = sys.stdout
    plain = not out.isatty()
    view = TerminalMarkdown(out.write, lambda: shutil.get_terminal_size().columns, markdown=markdown)

    def show(segment: Any, said: list[str]) -> None:
        if isinstance(segment, Said):
            said.append(segment.text)
            out.write(segment.text) if plain else view.said(segment.text)
        elif isinstance(segment, Thought):
            out.write(segment.text) if plain else view.thought(segment.text)
        out.flush()

    try:
        yield show
    finally:
        out.write("\n") if plain else view.end()
        out.flush()
