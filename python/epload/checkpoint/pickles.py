"""Reads pickles into stand-ins, without calling, importing or hashing anything, to check what they would build.

A pickle of a few hundred bytes can build a tuple that contains itself twice as often at each level. Hashing it, as the key of a
dict, or showing it in an error message, then takes for ever. Others nest so deeply that hashing overflows the stack, or call an
allowed function that allocates as many bytes as it is told to.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from epload.core.garbage_collection import paused

_FREE_NODES = 5_000_000
"""Number of values that any pickle may build, each counted as often as it occurs."""
_NODES_PER_BYTE = 8
_MAX_DEPTH = 100
_TEXT_CALLS = ("_codecs encode", "builtins bytearray", "__builtin__ bytearray")
"""Functions that torch allows for bytes. Given a number or another encoding, they take any amount of memory or time."""
_ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8", b"latin1", b"latin-1", b"ascii", b"utf-8")
"""Encodings that take time in proportion to the text. Pickles of bytes have latin1."""
_CONTAINERS = (
    "builtins set", "__builtin__ set", "torch Size", "collections Counter", "collections OrderedDict",
)  # fmt: skip
"""Classes that torch allows for the items of a list, a tuple or a dict. Given a tensor, they take as long as it has elements,
which may be views of one."""
_COPIES = "torch._utils _rebuild_device_tensor_from_cpu_tensor"
"""Function that copies a tensor, however many elements it has."""
_DIRECT_CALLS = frozenset((*_TEXT_CALLS, *_CONTAINERS, _COPIES))
_OPCODES = b"".join(
    [
        pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT,
        pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINSTRING, pickle.SHORT_BINSTRING,
        pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES,
        pickle.BINBYTES8, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
        pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND,
        pickle.BINPERSID, pickle.GLOBAL, pickle.STACK_GLOBAL,
    ]
)  # fmt: skip
"""The opcodes that mean for stand-ins what they mean for values."""


class Suspicious(ValueError):
    """A pickle is malformed, or builds more than a checkpoint needs. The text says what."""


class PickledName(str):
    """The name of a class or function: its module, a space and its name there."""


class PickledCall(list[Any]):
    """An object that a call returns: the arguments, then what was added to it, such as its state."""

    def __init__(self, function: str, arguments: tuple[Any, ...]) -> None:
        super().__init__(arguments)
        self.function = function

    def __repr__(self) -> str:
        return f"a call of {self.function}"


def read_pickle(raw: bytes, begin: int = 0, allowed: Collection[str] | None = None) -> tuple[Any, int]:
    """Reads the pickle that begins at byte ``begin``. Returns stand-ins for its value, and where it ends.

    Strings, numbers and tuples stand for themselves; a list for a list, a set, or the keys and values of a dict in turn; and a
    :class:`PickledName` and a :class:`PickledCall` for what they describe.

    Args:
        allowed: names that it may use; None for all.

    Raises:
        Suspicious: it must not be loaded.
    """
    stream = io.BytesIO(raw)
    stream.seek(begin)
    reader = _Reader(stream, allowed)
    try:
        with paused():
            value = reader.load()
    except Suspicious:
        raise
    except Exception as error:
        raise Suspicious(f"the pickle is malformed or truncated ({type(error).__name__})") from None
    end = stream.tell()
    if max(reader.memo, default=0) > len(raw):  # an unpickler in C has an array of this length
        raise Suspicious(f"the pickle refers to value {max(reader.memo)}, and has only {len(raw)} bytes")
    _check_size(value, _FREE_NODES + _NODES_PER_BYTE * (end - begin))
    return value, end


class _Reader(pickle._Unpickler):
    """Python's own unpickler, with other steps for what would call, import or hash."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: io.BytesIO, allowed: Collection[str] | None) -> None:
        super().__init__(stream, encoding="bytes")
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module} {name}"
        if self._allowed is not None and full not in self._allowed:
            raise Suspicious(f"the pickle names {module[:80]}.{name[:80]}, which no checkpoint needs")
        return PickledName(full)

    def persistent_load(self, pid: Any) -> Any:
        if self._allowed is not None:
            raise Suspicious("the pickle names a persistent object")
        return PickledCall("persistent_load", (pid,))

    def load_stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            raise Suspicious("the pickle ends with values that nothing uses")
        pickle._Unpickler.dispatch[pickle.STOP[0]](self)  # type: ignore[arg-type]

    def load_container(self) -> None:
        self.append([])

    def load_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].extend(items)

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].extend((key, value))

    def load_state(self) -> None:
        state = self.stack.pop()
        self.stack[-1].append(state)

    def load_call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, PickledName) or type(arguments) is not tuple:
            raise Suspicious("the pickle calls something that is no function")
        self.append(_call(function, arguments))

    dispatch[pickle.STOP[0]] = load_stop
    dispatch[pickle.EMPTY_DICT[0]] = dispatch[pickle.EMPTY_SET[0]] = load_container
    dispatch[pickle.APPENDS[0]] = dispatch[pickle.SETITEMS[0]] = dispatch[pickle.ADDITEMS[0]] = load_items
    dispatch[pickle.SETITEM[0]] = load_item
    dispatch[pickle.BUILD[0]] = load_state
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_call


def _call(function: str, arguments: tuple[Any, ...]) -> Any:
    """Returns the stand-in for what a function returns, if its time and memory are in proportion to its arguments."""
    fault = ""
    if function in _TEXT_CALLS:
        is_text = all(type(part) in (str, bytes) for part in arguments)
        if is_text and all(part in _ENCODINGS for part in arguments[1:]):
            return arguments[0] if arguments else b""
        fault = "with something else than text"
    elif function == _COPIES:
        fault = "which no checkpoint needs"
    elif function in _CONTAINERS and not all(map(_is_container, arguments)):
        fault = "with something else than a list, tuple or dict"
    if fault:
        raise Suspicious(f"the pickle calls {function.replace(' ', '.')}, {fault}")
    return PickledCall(function, arguments)


def _is_container(value: Any) -> bool:
    return value.function in _CONTAINERS if isinstance(value, PickledCall) else isinstance(value, list | tuple)


def _check_size(root: Any, limit: int) -> None:
    """Checks that a value consists of at most ``limit`` values, each counted as often as it occurs, and of few levels."""
    measured = {}

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Returns the number of values in a value and how deep they nest."""
        if isinstance(value, PickledName) and value in _DIRECT_CALLS:
            raise Suspicious("the pickle passes a function as a value")  # which hides its arguments
        if isinstance(value, str | bytes):
            return 1 + len(value) // 16, 0  # hashing a string again is free, showing it is not
        if not isinstance(value, tuple | list):
            return 1, 0
        if id(value) not in measured:
            parts = [measure(part, depth + 1) for part in value] if depth < _MAX_DEPTH else [(0, _MAX_DEPTH)]
            measured[id(value)] = (
                1 + sum(nodes for nodes, _ in parts),
                max((1 + height for _, height in parts), default=0),
            )
        nodes, height = measured[id(value)]
        if height > _MAX_DEPTH:
            raise Suspicious(f"the pickle nests values more than {_MAX_DEPTH} deep")
        if nodes > limit:
            raise Suspicious("the pickle builds values that are many times as large as the pickle itself")
        return nodes, height

    measure(root, 0)
