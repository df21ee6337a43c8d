"""A jinja2 environment for templates nobody has read: no way out of it, and an end to everything in it.

The library's immutable sandbox keeps templates away from Python's internals. What it leaves open is time and
memory, so each rendering has a budget. The parsed template is rewritten so that whatever loops, writes, compares
or builds a value passes through the budget. A value is weighed when it is built, as if it were written out, so
nothing small can hide something huge, and what exists may be written. Filters and methods are lists of known ones.

Knows: jinja2. Refuses to know: chats, models, tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 8 << 20  # written in one rendering, and in any one value
MAX_ITEMS = 1 << 20  # in any one value, all levels together
MAX_BUILT = 1 << 30  # characters and items of all values built in one rendering
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_BITS = 4096  # of a whole number

# Methods a template may call, by type; the others either change their owner or grow it without bound.
_METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (
        str,
        frozenset(
            {
                *(
                    "capitalize",
                    "casefold",
                    "count",
                    "endswith",
                    "find",
                    "index",
                    "join",
                    "lower",
                    "lstrip",
                    "partition",
                ),
                *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
                *("split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
                *("isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "isupper"),
            }
        ),
    ),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
    ((int, float, bytes), frozenset()),
)


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._written = 0
        self._built = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateRuntimeError(f"the template takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise TemplateRuntimeError(f"the template takes more than {MAX_SECONDS:g} seconds")

    def write(self, characters: int) -> None:
        self._written += characters
        if self._written > MAX_CHARACTERS:
            raise TemplateRuntimeError(f"the template writes more than {MAX_CHARACTERS} characters")

    def build(self, size: int) -> None:
        self._built += size
        if self._built > MAX_BUILT:
            raise TemplateRuntimeError(f"the template builds more than {MAX_BUILT} characters and items")


_budget: ContextVar[Budget] = ContextVar("budget")


def weigh(value: Any) -> int:
    """The size of a value written out, shared parts counted each time they appear; refuses what is too large."""
    if isinstance(value, str):
        items, characters = 0, len(value)
    elif isinstance(value, (list, tuple, Mapping)):
        items, characters = _weigh_collection(value)
    else:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateRuntimeError("the template computes a number that is too large")
        return 1
    if items > MAX_ITEMS or characters > MAX_CHARACTERS:
        raise TemplateRuntimeError("the template builds a value that is too large")
    return items + characters


def _weigh_collection(value: Any) -> tuple[int, int]:
    items = characters = 0
    stack = [value]
    while stack and items <= MAX_ITEMS:
        inside = stack.pop()
        if isinstance(inside, str):
            characters += len(inside)
        elif isinstance(inside, int):
            characters += inside.bit_length() // 4  # no more than its digits
        elif isinstance(inside, (list, tuple, Mapping)):
            items += len(inside)
            if items <= MAX_ITEMS:
                stack += inside
                stack += inside.values() if isinstance(inside, Mapping) else ()
    return items, characters


def built(value: Any) -> Any:
    """A value the template made: one step, and its weight."""
    budget = _budget.get()
    budget.step()
    budget.build(weigh(value))
    return value


def rounds(iterable: Iterable[Any]) -> Iterator[Any]:
    """A step for each item."""
    budget = _budget.get()
    for item in iterable:
        budget.step()
        yield item


# These take the context only so that the compiler does not compute them in advance, when there is no budget.


@pass_context
def _loop(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    return rounds(iterable)


@pass_context
def _write(context: Context, value: Any) -> str:
    text = str(value)
    _budget.get().write(len(text))
    return text


@pass_context
def _build(context: Context, value: Any) -> Any:
    return built(value)


METERS = {"quire_loop": _loop, "quire_write": _write, "quire_build": _build}


class _Meter(NodeTransformer):
    """Routes what takes time or memory through the filters above."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(node.iter, "quire_loop")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through(child, "quire_write") for child in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(node, "quire_build") if isinstance(node.arg, nodes.Slice) else node

    def _value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        # On the left of an assignment a tuple is a pattern, not a value.
        return node if getattr(node, "ctx", "load") == "store" else _through(node, "quire_build")

    visit_Concat = visit_List = visit_Tuple = visit_Dict = visit_Compare = visit_Test = _value


def _through(node: nodes.Node, name: str) -> nodes.Filter:
    """The expression (or literal text) piped through a filter."""
    value = nodes.Const(node.data) if isinstance(node, nodes.TemplateData) else node
    return nodes.Filter(value, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; here it is only its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment: `compile_text` a template once, `run` it with variables made of plain JSON values."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, filters: dict[str, Any], functions: dict[str, Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters = filters | METERS
        self.globals = {"range": self.globals["range"]} | functions  # the sandbox's own range is bounded

    def compile_text(self, source: str) -> Template:
        return self.from_string(source)

    def run(self, template: Template, variables: dict[str, Any]) -> str:
        token = _budget.set(Budget())
        try:
            return template.render(variables)
        finally:
            _budget.reset(token)

    # What the library calls

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Meter().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is not offered: field widths are a way to write a gigabyte in nine characters."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return built(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            weigh([args, kwargs])  # the macro will see them as collections
        if isinstance(__obj, LoopContext):  # a recursive loop goes one level down
            args = (rounds(args[0]), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = check_method(owner, getattr(__obj, "__name__", ""), args)
        return built(super().call(__context, __obj, *args, **kwargs))


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse before computing what would be too large once computed."""
    if operator == "%" and isinstance(left, str):
        raise TemplateRuntimeError("text % values is not offered to templates; join texts with ~ instead")
    if operator == "**":
        bits = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
        _within(bits, MAX_BITS)
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                _within(weigh(sequence) * count, MAX_ITEMS if not isinstance(sequence, str) else MAX_CHARACTERS)


def check_method(owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same for methods of texts; an iterator to join is read out first."""
    if name == "replace" and len(args) >= 2:
        check_replace(owner, args[0], args[1])
    if name == "join" and args:
        parts = list(rounds(args[0]))
        _within(weigh(parts) + len(owner) * len(parts), MAX_CHARACTERS)
        return (parts,)
    return args


def check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _within(len(text) + text.count(old) * len(new), MAX_CHARACTERS)


def _within(size: int, limit: int) -> None:
    if size > limit:
        raise TemplateRuntimeError("the template builds a value that is too large")
