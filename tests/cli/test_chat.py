"""The interactive chat: commands, several lines, and what Ctrl-C does; on a real terminal too."""

from __future__ import annotations

import builtins
import json
import os
import pty
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.assets import cache_dir
from quire.cli.chat_commands import chat
from quire.cli.chat_session import ChatSession
from quire.types.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def talker(default_model: Any) -> Iterator[LLM]:
    with LLM("smollm2-135m", kv_memory="64M", max_model_len=1024) as llm:
        yield llm


@pytest.fixture
def session(talker: LLM) -> ChatSession:
    return ChatSession(talker, SamplingParams(temperature=0, max_tokens=12), markdown=True)


@pytest.fixture
def say(session: ChatSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    """Types lines into a chat; returns what it showed."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))

    def typed(*lines: str | type[BaseException]) -> str:
        left = list(lines)

        def read(prompt: str = "") -> str:
            if not left:
                raise EOFError
            line = left.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)
        chat(session)
        shown = capsys.readouterr()
        return shown.out + shown.err

    return typed


def test_a_conversation(say, session: ChatSession) -> None:
    text = say("What is gravity?", '"""What is', 'gravity?"""', "/bye", "never read")
    assert "/help" in text and text.count("Gravity is") == 2
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant"] * 2 and session.messages[2]["content"] == "What is\ngravity?"


def test_parameters(say, session: ChatSession) -> None:
    text = say(
        "/set temperature 0.5", "/set parameter num_predict 7", "/set top_k 3", "/set seed 4", "/set stop xyz",
        "/set temperature hot", "/set temperature -1", "/set bogus 3", "/set", "/set seed none", "/show",
    )  # fmt: skip
    params = session.params
    assert (params.temperature, params.max_tokens, params.top_k, params.stop, params.seed) == (0.5, 7, 3, ["xyz"], None)
    assert (
        "temperature does not take 'hot': it wants a number" in text
        and "no parameter 'bogus'" in text
        and "usage: /set" in text
    )
    assert text.count("error:") == 3 and "max_tokens 7" in text and "smollm2-135m, context 1,024" in text


def test_switches_and_the_system_message(say, session: ChatSession) -> None:
    text = say("/set verbose", "/system You are brief.", "What is gravity?", "/set quiet", "/set think", "/set plain")
    assert re.search(r"prompt \d+ tokens( \(\d+ cached\))?, first token after .* answer \d+ tokens, .* tok/s", text)
    assert session.system == "You are brief." and not session.verbose and session.thoughts and not session.markdown


def test_cached_tokens_are_those_of_the_prompt(say, session: ChatSession) -> None:
    session.verbose = True
    question = "What is gravity, and why does an apple fall to the ground rather than to the sky?"
    told = re.findall(r"prompt (\d+) tokens \((\d+) cached\)", say(question, "/regenerate", "/regenerate"))
    assert told and all(0 < int(cached) < int(prompt) for prompt, cached in told)


def test_again_over_and_what_is_no_command(say, session: ChatSession) -> None:
    text = say("/regenerate", "What is gravity?", "/regenerate", "/nonsense", "/clear", "/?")
    assert "no question to answer again" in text and text.count("Gravity is") == 2
    assert "no command /nonsense" in text and session.messages == [] and "/regenerate " in text


def test_conversations_are_saved_and_loaded(say, session: ChatSession, tmp_path: Path) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    say("/system Be kind.", "/set top_k 5", "What is gravity?", f"/save {file}")
    kept = json.loads(file.read_text())
    assert [m["role"] for m in kept["messages"]] == ["user", "assistant"] and kept["parameters"]["top_k"] == 5
    before = list(session.messages)
    other.write_text('{"messages": [{"role": 3}]}')
    text = say("/clear", "/set top_k 0", "/system x", f"/load {file}", "/save", "/load /no/file", f"/load {other}")
    text += say(f"/save {tmp_path / 'no' / 'where'}")
    assert session.messages == before and session.system == "Be kind." and session.params.top_k == 5
    assert (
        "name a file" in text
        and "/no/file cannot be read: No such file" in text
        and "where cannot be written" in text
        and "is no saved conversation" in text
    )


def test_an_interrupt_at_the_prompt_does_not_leave(say, session: ChatSession) -> None:
    text = say(KeyboardInterrupt, "What is gravity?")
    assert "Ctrl-D or /exit" in text and len(session.messages) == 2


def test_an_interrupt_ends_the_answer_and_leaves_the_engine_whole(say, session: ChatSession, monkeypatch) -> None:
    core, steps = session.llm._link.core, iter(range(100))
    step = core.step

    def interrupted():
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)  # in the middle of the engine's work
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    session.params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    say("What is gravity?")
    assert 0 < len(session.messages[1]["content"]) < 60 and not core.busy
    assert "Gravity is" in say("/regenerate")  # steps go on as if nothing had been


def test_a_refused_question_is_not_kept(say, session: ChatSession) -> None:
    assert "error:" in say("word " * 3000) and session.messages == []


def read_until(terminal: int, *wanted: str) -> str:
    text = ""
    while not all(re.search(word, text) for word in wanted):
        text += os.read(terminal, 4096).decode(errors="replace")
    return text


INTERRUPTED = """
import _thread, os, readline, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from quire.cli.chat_commands import read_line
threading.Thread(target=lambda: os.read(int(sys.argv[2]), 1) and _thread.interrupt_main()).start()
try:
    read_line(">>> ")
except KeyboardInterrupt:
    print("seen", signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM))
"""


@pytest.mark.timeout(30)
def test_an_interrupt_that_interrupts_no_wait_is_seen() -> None:
    """`interrupt_main` leaves what a Ctrl-C leaves that comes while readline deals with a key: a mark, no signal."""
    pytest.importorskip("readline")
    told, tell = os.pipe()
    os.set_inheritable(told, True)
    process, terminal = pty.fork()
    if not process:
        source = str(Path(__file__).parents[2] / "src")
        os.execv(sys.executable, [sys.executable, "-c", INTERRUPTED, source, str(told)])
    try:
        read_until(terminal, ">>> ")
        os.write(tell, b"!")
        assert "seen (0.0, 0.0) 0" in read_until(terminal, r"seen.*\n")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        for end in (terminal, told, tell):
            os.close(end)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_on_a_terminal(default_model: Any, tmp_path: Path) -> None:
    """Lines are edited, history is kept and comes back, Ctrl-C clears a line, Ctrl-D leaves."""
    pytest.importorskip("readline")
    cache = tmp_path / "cache"
    (cache / "embedded").mkdir(parents=True)
    (cache / "embedded" / "smollm2-135m.gguf").symlink_to(cache_dir() / "embedded" / "smollm2-135m.gguf")
    process, terminal = pty.fork()
    if not process:
        os.environ |= {"QUIRE_CACHE": str(cache), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        words = ["run", "--temperature", "0", "--max-tokens", "8", "--kv-memory", "64M", "--verbose"]
        os.execv(sys.executable, [sys.executable, "-m", "quire", *words])
    try:
        read_until(terminal, r">>> ")
        os.write(terminal, b"What is gravitx\x7fy?\r")  # a mistake, taken back
        assert "Gravity is" in read_until(terminal, r"tok/s\r\n(.|\n)*>>> ")
        os.write(terminal, b"half a li\x03")
        read_until(terminal, "Ctrl-D or /exit", r">>> $")
        os.write(terminal, b"\x1b[A\r")  # the line before
        assert "Gravity is" in read_until(terminal, r"What is gravity\?", r"tok/s\r\n(.|\n)*>>> ")
        os.write(terminal, b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        process = 0
    finally:
        if process:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(terminal)
    assert "What is gravity?" in (cache / "history").read_text()
