"""Checks what a pickle builds, before it is loaded.

A pickle of a few hundred bytes can build a tuple that contains itself twice as often at each level. Hashing it, as the key of a
dict, or showing it in an error message, then takes for ever. Others nest so deeply that hashing overflows the stack, or call an
allowed function that allocates as many bytes as it is told to. So the opcodes are followed first, with a stand-in for each
value, and a pickle is refused if its values are much larger than the pickle itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

_FREE_NODES = 5_000_000
"""Nodes that shared values may have in total, however small the pickle is."""
_NODES_PER_BYTE = 8
_MAX_DEPTH = 100
"""Limit of tuples in tuples."""
_ENCODINGS = (b"latin1", b"latin-1", b"ascii", b"utf-8")
"""Encodings that take time in proportion to the text. Pickles of bytes have latin1."""
_TEXT_CALLS = ("_codecs encode", "builtins bytearray", "__builtin__ bytearray")
"""Allowed by torch, for bytes. Given a number or another encoding, they take any amount of memory or time."""
_CONTAINERS = (
    "builtins set", "__builtin__ set", "torch Size", "collections Counter", "collections OrderedDict",
)  # fmt: skip
"""Allowed by torch, for what is in a list, a tuple or a dict. Given a tensor, they take as long as it has elements, which may be
views of one."""
_DEVICE_TENSOR = "torch._utils _rebuild_device_tensor_from_cpu_tensor"
"""Copies a tensor, however many elements it has."""
_TENSORS = ("torch._utils _rebuild_tensor", "torch._utils _rebuild_parameter")

Value = Any
"""A stand-in: None for a number and the like, bytes for a string, str for the name of a class or function, and a list for what
contains other values, with these entries: the number of values in it and of 16 bytes of strings, each as often as it occurs;
the number of tuples in tuples; the items, of a tuple; True if it occurs more than once, so that it must not grow; True if it may
be something else than a container, such as a tensor."""
_NODES, _DEPTH, _ITEMS, _IS_SHARED, _IS_OBJECT = range(5)


class Suspicious(ValueError):
    """A pickle is malformed, or builds more than a checkpoint needs. The text says what."""


def check_pickle(raw: bytes, begin: int = 0, records: bool = False) -> int:
    """Follows the pickle that begins at byte ``begin``. Returns where it ends.

    Args:
        records: True if the pickle is loaded with classes whose objects are hashed and shown without what is in them.

    Raises:
        Suspicious: it must not be loaded.
    """
    try:
        return _Check(raw, records).run(begin)
    except (IndexError, KeyError):
        raise Suspicious("the pickle is malformed or truncated") from None


_NUMBER, _STRING, _PUT, _GET, _OTHER = range(5)
_OPCODES: list[tuple[int, int]] = [(_OTHER, 0)] * 256
"""The kind of each opcode, and how many bytes follow: a number, the length of a string, or a number in the memo."""
for _kind, _nbytes, _codes in (
    (_NUMBER, 0, pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE),
    (_NUMBER, 1, pickle.BININT1),
    (_NUMBER, 2, pickle.BININT2),
    (_NUMBER, 4, pickle.BININT),
    (_NUMBER, 8, pickle.BINFLOAT),
    (_STRING, 1, pickle.SHORT_BINSTRING + pickle.SHORT_BINUNICODE + pickle.SHORT_BINBYTES + pickle.LONG1),
    (_STRING, 4, pickle.BINSTRING + pickle.BINUNICODE + pickle.BINBYTES),
    (_STRING, 8, pickle.BINUNICODE8 + pickle.BINBYTES8 + pickle.BYTEARRAY8),
    (_PUT, 1, pickle.BINPUT),
    (_PUT, 4, pickle.LONG_BINPUT),
    (_GET, 1, pickle.BINGET),
    (_GET, 4, pickle.LONG_BINGET),
):
    for _code in _codes:
        _OPCODES[_code] = _kind, _nbytes
_MARK, _STOP, _LONG1, _MEMOIZE = pickle.MARK[0], pickle.STOP[0], pickle.LONG1[0], pickle.MEMOIZE[0]


class _Check:
    """The state of an unpickler, with stand-ins for values."""

    def __init__(self, raw: bytes, records: bool) -> None:
        self._raw = raw
        self._records = records
        self._position = 0
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, Value] = {}
        self._total = 0
        """Nodes of values that occur once more, as often as they do, and bytes of text that functions copy."""
        self._limit = _FREE_NODES + _NODES_PER_BYTE * len(raw)

    def run(self, begin: int) -> int:
        raw, stack, memo, opcodes = self._raw, self._stack, self._memo, _OPCODES
        push, number_of = stack.append, int.from_bytes
        at = begin
        while (code := raw[at]) != _STOP:
            if code == _MEMOIZE:
                at += 1
                memo[len(memo)] = stack[-1]
                continue
            kind, nbytes = opcodes[code]
            at += 1 + nbytes
            if kind == _GET:
                value = memo[raw[at - 1] if nbytes == 1 else number_of(raw[at - nbytes : at], "little")]
                push(value)
                if value.__class__ is list or value.__class__ is bytes:
                    self._share(value)
            elif kind == _NUMBER:
                push(None)
            elif kind == _STRING:
                end = at + int.from_bytes(raw[at - nbytes : at], "little")
                if end > len(raw):
                    raise Suspicious(f"the pickle has a string of {end - at} bytes, more than are left in it")
                stack.append(None if code == _LONG1 else raw[at:end])
                at = end
            elif code == _MARK:
                self._marks.append(len(stack))
            elif kind == _PUT:
                number = int.from_bytes(raw[at - nbytes : at], "little")
                if number > len(raw):  # an unpickler in C has an array of this length
                    raise Suspicious(f"the pickle refers to value {number}, and has only {len(raw)} bytes")
                memo[number] = stack[-1]
            elif step := _STEPS.get(code):
                self._position = at
                step(self)
                at = self._position
            else:
                raise Suspicious(f"the pickle has the opcode {bytes([code])!r}, which no checkpoint needs")
        self._count(0, _FREE_NODES + _NODES_PER_BYTE * (at - begin))
        return at + 1

    def _count(self, nodes: int, limit: int) -> None:
        """Checks that values that occur more than once are not much larger than the pickle."""
        self._total += nodes
        if self._total > limit:
            raise Suspicious(f"the pickle has {len(self._raw)} bytes, and builds values that are many times as large")

    def _share(self, value: Value) -> None:
        """Counts a value that occurs once more."""
        if value.__class__ is list:
            value[_IS_SHARED] = True
            self._count(value[_NODES], self._limit)
        else:
            self._count(1 + len(value) // 16, self._limit)

    def _pop(self, count: int) -> list[Value]:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError
        del self._stack[-count:]
        return items

    def _pop_mark(self) -> list[Value]:
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _push_tuple(self, items: list[Value]) -> None:
        nodes, depth = _measured(items)
        if depth >= _MAX_DEPTH:
            raise Suspicious(f"the pickle has tuples nested more than {_MAX_DEPTH} deep")
        self._stack.append([1 + nodes, 1 + depth, items, False, False])

    def _add(self, items: list[Value]) -> None:
        """Adds items to the list, dict or object on top of the stack."""
        target = self._stack[-1]
        if target.__class__ is not list or target[_ITEMS] is not None:
            raise Suspicious("the pickle adds items to something that has none")
        if target[_IS_SHARED]:
            raise Suspicious("the pickle adds items to a value that is used elsewhere")
        target[_NODES] += _measured(items)[0]

    def _reduce(self) -> None:
        function, arguments = self._pop(2)
        items = _items(arguments)
        if function in _TEXT_CALLS:
            if not all(item.__class__ is bytes for item in items) or not {*items[1:]} <= {*_ENCODINGS}:
                raise Suspicious(f"the pickle calls {function.replace(' ', '.')} with something else than text")
            self._count(sum(map(len, items)), self._limit)
            if function == _TEXT_CALLS[0]:
                self._stack.append(items[0] if items else b"")
                return
        self._call(function, items)
        if function.__class__ is str and function.startswith(_TENSORS):
            self._stack[-1] = None

    def _new_object(self) -> None:
        function, arguments = self._pop(2)
        self._call(function, _items(arguments))

    def _call(self, function: Value, arguments: list[Value]) -> None:
        """Pushes what a call returns. Checks that a container is made of another one, and not of a tensor."""
        if function == _DEVICE_TENSOR:
            raise Suspicious(f"the pickle calls {function.replace(' ', '.')}, which no checkpoint needs")
        is_container = function in _CONTAINERS
        if is_container and any(value.__class__ is not list or value[_IS_OBJECT] for value in arguments):
            raise Suspicious(
                f"the pickle calls {function.replace(' ', '.')} with something else than a list, tuple or dict"
            )
        nodes = 0 if self._records else _measured(arguments)[0]
        self._stack.append([1 + nodes, 0, None, False, not is_container])

    def _global(self) -> None:
        end = self._raw.index(b"\n", self._raw.index(b"\n", self._position) + 1)
        self._stack.append(" ".join(self._raw[self._position : end].decode(errors="replace").split("\n")))
        self._position = end + 1

    def _stack_global(self) -> None:
        module, name = self._pop(2)
        if name.__class__ is not bytes or module.__class__ is not bytes:
            raise Suspicious("the pickle names a class by something else than two strings")
        self._stack.append(f"{module.decode(errors='replace')} {name.decode(errors='replace')}")

    def _skip(self, nbytes: int) -> None:
        self._position += nbytes


def _measured(values: list[Value]) -> tuple[int, int]:
    """Returns how much values count, and the depth of the deepest. Checks that none is a function that is only to be called
    directly, where its arguments are seen."""
    nodes, depth = len(values), 0
    if values.count(None) == nodes:
        return nodes, 0
    for value in values:
        if value is None:
            continue
        if value.__class__ is list:
            nodes += value[_NODES] - 1
            depth = max(depth, value[_DEPTH])
        elif value.__class__ is bytes:
            nodes += len(value) // 16  # hashing a string again is free, showing it is not
        elif value.__class__ is str and value in _TEXT_CALLS:
            raise Suspicious("the pickle passes a function as a value")
    return nodes, depth


def _items(arguments: Value) -> list[Value]:
    """Returns the arguments of a call; those that are no tuple as one."""
    return arguments[_ITEMS] if arguments.__class__ is list and arguments[_ITEMS] is not None else [arguments]


_STEPS: dict[int, Callable[[_Check], object]] = {
    pickle.PROTO[0]: lambda check: check._skip(1),
    pickle.FRAME[0]: lambda check: check._skip(8),
    pickle.GLOBAL[0]: _Check._global,
    pickle.STACK_GLOBAL[0]: _Check._stack_global,
    pickle.EMPTY_TUPLE[0]: lambda check: check._push_tuple([]),
    pickle.TUPLE1[0]: lambda check: check._push_tuple(check._pop(1)),
    pickle.TUPLE2[0]: lambda check: check._push_tuple(check._pop(2)),
    pickle.TUPLE3[0]: lambda check: check._push_tuple(check._pop(3)),
    pickle.TUPLE[0]: lambda check: check._push_tuple(check._pop_mark()),
    pickle.EMPTY_LIST[0]: lambda check: check._stack.append([1, 0, None, False, False]),
    pickle.EMPTY_DICT[0]: lambda check: check._stack.append([1, 0, None, False, False]),
    pickle.EMPTY_SET[0]: lambda check: check._stack.append([1, 0, None, False, False]),
    pickle.APPEND[0]: lambda check: check._add(check._pop(1)),
    pickle.APPENDS[0]: lambda check: check._add(check._pop_mark()),
    pickle.SETITEM[0]: lambda check: check._add(check._pop(2)),
    pickle.SETITEMS[0]: lambda check: check._add(check._pop_mark()),
    pickle.ADDITEMS[0]: lambda check: check._add(check._pop_mark()),
    pickle.REDUCE[0]: _Check._reduce,
    pickle.NEWOBJ[0]: _Check._new_object,
    pickle.BUILD[0]: lambda check: check._add(check._pop(1)),
    pickle.BINPERSID[0]: lambda check: check._stack.append((check._stack.pop(), None)[1]),
}
"""The steps of the other opcodes."""
