"""Checks what a pickle builds, before it is loaded.

A pickle of a few hundred bytes can build a tuple that contains itself twice as often at each level. Hashing it, as the key of a
dict, or showing it in an error message, then takes for ever. Others nest so deeply that hashing overflows the stack, or call an
allowed function that allocates as many bytes as it is told to. So the opcodes are followed first, with a stand-in for each
value, and a pickle is refused if its values are much larger than the pickle itself. Tensors as ``torch.save`` writes them, which
are nearly all of a large pickle, are recognized as a whole: the check takes a twentieth of the time of ``torch.load``.
"""

from __future__ import annotations

import pickle
import re
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
"""None for a number and the like, bytes for a string, str for the name of a class or function, and a list for what contains other
values: how deep it is as a tuple of tuples, then these values."""


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


# What follows an opcode: bytes of a number, or of the length of a string.
_NUMBERS = {
    pickle.NONE: 0, pickle.NEWTRUE: 0, pickle.NEWFALSE: 0, pickle.BININT: 4, pickle.BININT1: 1, pickle.BININT2: 2,
    pickle.BINFLOAT: 8,
}  # fmt: skip
_STRINGS = {
    pickle.SHORT_BINSTRING: 1, pickle.BINSTRING: 4, pickle.SHORT_BINUNICODE: 1, pickle.BINUNICODE: 4, pickle.BINUNICODE8: 8,
    pickle.SHORT_BINBYTES: 1, pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.BYTEARRAY8: 8, pickle.LONG1: 1, pickle.LONG4: 4,
}  # fmt: skip
_LONGS = pickle.LONG1 + pickle.LONG4
_NUMBER_BYTES = [_NUMBERS.get(bytes([code]), -1) for code in range(256)]
_LENGTH_BYTES = [_STRINGS.get(bytes([code]), 0) for code in range(256)]
# Parts of regular expressions: opcodes with what follows them.
_PUT, _REFERENCE, _INTEGER = rb"(?:q.|r....)", rb"(?:h.|j....)", rb"(?:K.|M..|J....|\x8a\x05.....)"
_SIZES = rb"\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,8}t)" % (*[_INTEGER] * 4,)
_GET, _NEW = b"(" + _REFERENCE + b")", b"(" + _PUT + b")"
_TENSOR = re.compile(
    rb"\(\(" + _GET * 2 + rb"X(.)\0\0\0([0-9]{1,20})" + _NEW + _GET + _INTEGER + b"t" + _NEW + b"Q" + _INTEGER
    + (b"(?:" + _SIZES + _NEW + b")") * 2 + rb"[\x88\x89]" + _GET + rb"\)R" + _NEW + b"t" + _NEW + b"R" + _NEW,
    re.DOTALL,
)  # fmt: skip
"""The arguments of ``_rebuild_tensor_v2`` as ``torch.save`` writes them: ``("storage", class, key, location, numel)``, the
offset, the sizes, the strides, ``requires_grad`` and an empty OrderedDict. The groups are what refers to values that were written
before, the length and the text of the key, and the numbers that values get in the memo."""
# The same in the metadata of a DCP checkpoint, where each \x94 adds a value to the memo.
_SIZE = b"(" + _SIZES + rb"\x94)\x85\x94R\x94"
_TORCH_SIZE = re.compile(_SIZE, re.DOTALL)
_ATTRIBUTES = b"(?:" + _REFERENCE + b"(?:" + _REFERENCE + b"|" + _INTEGER + rb"|[N\x88\x89])){0,8}"
_RECORD = re.compile(
    rb"\)\x81\x94}\x94\(" + (_ATTRIBUTES + b"(?:" + _REFERENCE * 2 + _SIZE + b")?") * 2
    + _ATTRIBUTES + b"(?:" + _REFERENCE + rb"\x8c(.)([\w.-]+)\x94)?" + _ATTRIBUTES + b"ub",
    re.DOTALL,
)  # fmt: skip
"""An object with a dict of attributes: numbers, what was written before, up to two ``torch.Size`` and one string. The groups are
the sizes, and the length and the text of the string."""
_PROPERTIES = re.compile(rb"\)\x81\x94\(" + _GET + _GET + rb"[\x88\x89]" + _GET + rb"[\x88\x89]t\x94b", re.DOTALL)
"""A ``TensorProperties`` whose dtype, layout and memory format were written before."""
_PART: Value = [2, *[None] * 30]
"""A stand-in for what is inside what these match, no smaller than any of it."""
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET, _MARK, _TUPLE, _STOP = (
    each[0]
    for each in (
        pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MARK, pickle.TUPLE, pickle.STOP
    )
)  # fmt: skip


class _Check:
    """The state of an unpickler, with stand-ins for values."""

    def __init__(self, raw: bytes, records: bool) -> None:
        self._raw = raw
        self._records = records
        self._at = 0
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, Value] = {}
        self._flat: dict[int, Value] = {}
        """Tuples of numbers alone, by length."""
        self._usual: set[tuple[bytes, ...]] = set()
        """References within what is usual, to values of the usual kinds."""
        self._next = 0
        """The lowest number that a value may get that is numbered explicitly."""
        self._counts = False
        """True if values are numbered in their order."""
        self._encoded = 0
        """Bytes of text that functions copy."""
        self._skipped = 0
        """Values that were memoized and are not in the memo."""
        self._shared: list[Value] = []
        """Values that occur once more, as often as they do."""

    def run(self, begin: int) -> int:
        raw, stack, marks = self._raw, self._stack, self._marks
        at = begin
        while (code := raw[at]) != _STOP:
            at += 1
            if (nbytes := _NUMBER_BYTES[code]) >= 0:
                stack.append(None)
                at += nbytes
            elif code in (_BINPUT, _LONG_BINPUT):
                nbytes = 1 if code == _BINPUT else 4
                self._put(int.from_bytes(raw[at : at + nbytes], "little"))
                at += nbytes
            elif code in (_BINGET, _LONG_BINGET):
                nbytes = 1 if code == _BINGET else 4
                value = self._get(raw[at - 1 : at + nbytes])
                at += nbytes
                if value.__class__ is str and (end := self._usual_end(value, at)):
                    stack.append(None)
                    at = end
                else:
                    self._share(value)
            elif code == _MARK:
                marks.append(len(stack))
            elif code == _TUPLE:
                self._push_tuple(self._pop_mark())
            elif nbytes := _LENGTH_BYTES[code]:
                at += nbytes
                end = at + int.from_bytes(raw[at - nbytes : at], "little")
                if end > len(raw):
                    raise Suspicious(f"the pickle has a string of {end - at} bytes, more than are left in it")
                stack.append(None if code in _LONGS else raw[at:end])
                at = end
            else:
                step = _STEPS.get(code)
                if step is None:
                    raise Suspicious(f"the pickle has the opcode {bytes([code])!r}, which no checkpoint needs")
                self._at = at
                step(self)
                at = self._at
        self._check_size(at - begin)
        return at + 1

    def _put(self, number: int) -> None:
        if number > len(self._raw):  # an unpickler in C has an array of this length
            raise Suspicious(f"the pickle refers to value {number}, and has only {len(self._raw)} bytes")
        if number < self._next or self._counts:  # no pickler gives a number twice, or counts after it has named one
            raise Suspicious(f"the pickle gives the number {number} to a second value")
        self._next = number + 1
        self._memo[number] = self._stack[-1]

    def _memoize(self) -> None:
        self._count(0)
        self._memo[len(self._memo) + self._skipped] = self._stack[-1]

    def _count(self, skipped: int) -> None:
        """Notes that so many values were added to the memo, whose numbers follow from their order."""
        if self._next:
            raise Suspicious("the pickle numbers values in two ways")
        self._counts = True
        self._skipped += skipped

    def _get(self, reference: bytes) -> Value:
        return self._memo.get(int.from_bytes(reference[1:], "little"), _PART)

    def _usual_end(self, name: str, begin: int) -> int:
        """Returns where a usual value, such as a tensor, ends that follows the name of its function or class; 0 for any other."""
        if self._records:
            return self._record_end(name, begin)
        match = _TENSOR.match(self._raw, begin) if name == "torch._utils _rebuild_tensor_v2" else None
        if match is None or match[3][0] != len(match[4]):
            return 0
        references = match.group(1, 2, 6, 10)
        if references not in self._usual:
            word, kind, location, hooks = map(self._get, references)
            is_text = word.__class__ is location.__class__ is bytes and len(word + location) < 100
            if not is_text or kind.__class__ is not str or hooks != "collections OrderedDict":
                return 0
            self._usual.add(references)
        following = self._next
        for put in match.group(5, 7, 8, 9, 11, 12, 13):
            if put is not None and following > (following := 1 + int.from_bytes(put[1:], "little")) - 1:
                return 0
        self._next = following
        return match.end()

    def _record_end(self, name: str, begin: int) -> int:
        """Returns the same for the metadata of a DCP checkpoint."""
        if match := _TORCH_SIZE.match(self._raw, begin):
            self._count(2 + (match[1] != b")"))
        elif match := _RECORD.match(self._raw, begin):
            *sizes, length, text = match.groups()
            if text is not None and length[0] != len(text):
                return 0
            self._count(2 + (text is not None) + sum(2 + (each != b")") for each in sizes if each is not None))
        elif match := _PROPERTIES.match(self._raw, begin):
            if match.groups() not in self._usual:
                if any(self._get(reference).__class__ is list for reference in match.groups()):
                    return 0
                self._usual.add(match.groups())
            self._count(2)
        else:
            return 0
        return match.end()

    def _share(self, value: Value) -> None:
        self._stack.append(value)
        if value.__class__ is list or value.__class__ is bytes:
            self._shared.append(value)

    def _pop_mark(self) -> list[Value]:
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _push_tuple(self, items: list[Value]) -> None:
        if items.count(None) == len(items):
            self._stack.append(self._flat.setdefault(len(items), [1, *items]))
            return
        depth = 1 + max((item[0] for item in items if item.__class__ is list), default=0)
        if depth > _MAX_DEPTH:
            raise Suspicious(f"the pickle has tuples nested more than {_MAX_DEPTH} deep")
        _check_arguments(items)
        self._stack.append([depth, *items])

    def _take(self, count: int) -> None:
        items = self._stack[-count:]
        del self._stack[-count:]
        self._push_tuple(items)

    def _add(self, items: list[Value]) -> None:
        """Adds items to the list, dict or object on top of the stack."""
        target = self._stack[-1]
        if target.__class__ is not list or target is _PART:
            raise Suspicious("the pickle adds items to something that has none")
        _check_arguments(items)
        target.extend(items)

    def _add_last(self, count: int) -> None:
        items = self._stack[-count:]
        del self._stack[-count:]
        self._add(items)

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if function in _TEXT_CALLS:
            texts = args[1:] if args.__class__ is list else [None]
            if not all(text.__class__ is bytes for text in texts) or not {*texts[1:]} <= {*_ENCODINGS}:
                raise Suspicious(f"the pickle calls {function.replace(' ', '.')} with something else than text")
            self._encoded += sum(map(len, texts))
            if function == _TEXT_CALLS[0]:
                self._stack.append(texts[0] if texts else b"")
                return
        self._check_call(function, args[1:] if args.__class__ is list else [args])
        is_tensor = function.__class__ is str and function.startswith(_TENSORS)
        self._stack.append(None if is_tensor else [0] if self._records else [0, args])

    def _new_object(self, arguments: int) -> None:
        items = self._stack[-arguments:]
        self._check_call(self._stack[-arguments - 1], items[0][1:] if items[0].__class__ is list else items)
        del self._stack[-arguments - 1 :]
        self._stack.append([0] if self._records else [0, *items])

    def _check_call(self, function: Value, arguments: list[Value]) -> None:
        """Checks that a container is made of another one, and not of a tensor."""
        if function == _DEVICE_TENSOR:
            raise Suspicious(f"the pickle calls {function.replace(' ', '.')}, which no checkpoint needs")
        if function in _CONTAINERS and any(each.__class__ is not list or each is _PART for each in arguments):
            raise Suspicious(
                f"the pickle calls {function.replace(' ', '.')} with something else than a list, tuple or dict"
            )

    def _global(self) -> None:
        end = self._raw.index(b"\n", self._raw.index(b"\n", self._at) + 1)
        self._stack.append(" ".join(self._raw[self._at : end].decode(errors="replace").split("\n")))
        self._at = end + 1

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if name.__class__ is not bytes or module.__class__ is not bytes:
            raise Suspicious("the pickle names a class by something else than two strings")
        self._stack.append(f"{module.decode(errors='replace')} {name.decode(errors='replace')}")

    def _skip(self, nbytes: int) -> None:
        self._at += nbytes

    def _persistent(self) -> None:
        self._stack[-1] = None

    def _check_size(self, nbytes: int) -> None:
        """Checks that values that occur more than once are not much larger than the pickle."""
        limit = _FREE_NODES + _NODES_PER_BYTE * nbytes
        sizes: dict[int, int] = {}
        total = self._encoded
        for value in self._shared:
            total += _size(value, sizes, limit) if value.__class__ is list else _weight(value)
            if total > limit:
                raise Suspicious(f"the pickle has {nbytes} bytes, and builds values that are many times as large")


def _weight(value: Value) -> int:
    """Returns what a number or a string counts. Hashing a string again is free, showing it is not."""
    return 1 + len(value) // 16 if value.__class__ is bytes else 1


def _size(root: list[Value], sizes: dict[int, int], limit: int) -> int:
    """Returns the nodes of a value and bytes of its strings, each as often as it occurs, up to ``limit``.

    Args:
        sizes: those known, by id.
    """
    pending = [(root, False)]
    while pending:
        value, is_known = pending.pop()
        if is_known:
            parts = (sizes[id(each)] if each.__class__ is list else _weight(each) for each in value[1:])
            sizes[id(value)] = min(limit + 1, 1 + sum(parts))
        elif sizes.get(id(value), 0) < 0:
            raise Suspicious("the pickle has a value that contains itself")
        elif id(value) not in sizes:
            sizes[id(value)] = -1
            pending.append((value, True))
            pending += [(each, False) for each in value[1:] if each.__class__ is list]
    return sizes[id(root)]


def _check_arguments(items: list[Value]) -> None:
    """Checks that no item is a function that is only to be called directly, where its arguments are seen."""
    if any(item in _TEXT_CALLS for item in items if item.__class__ is str):
        raise Suspicious("the pickle passes a function as a value")


_STEPS: dict[int, Callable[[_Check], object]] = {
    pickle.PROTO[0]: lambda check: check._skip(1),
    pickle.FRAME[0]: lambda check: check._skip(8),
    pickle.GLOBAL[0]: _Check._global,
    pickle.STACK_GLOBAL[0]: _Check._stack_global,
    pickle.MEMOIZE[0]: _Check._memoize,
    pickle.DUP[0]: lambda check: check._share(check._stack[-1]),
    pickle.POP[0]: lambda check: check._stack.pop(),
    pickle.POP_MARK[0]: _Check._pop_mark,
    pickle.EMPTY_TUPLE[0]: lambda check: check._push_tuple([]),
    pickle.TUPLE1[0]: lambda check: check._take(1),
    pickle.TUPLE2[0]: lambda check: check._take(2),
    pickle.TUPLE3[0]: lambda check: check._take(3),
    pickle.FROZENSET[0]: lambda check: check._push_tuple(check._pop_mark()),
    pickle.EMPTY_LIST[0]: lambda check: check._stack.append([0]),
    pickle.EMPTY_DICT[0]: lambda check: check._stack.append([0]),
    pickle.EMPTY_SET[0]: lambda check: check._stack.append([0]),
    pickle.APPEND[0]: lambda check: check._add_last(1),
    pickle.APPENDS[0]: lambda check: check._add(check._pop_mark()),
    pickle.SETITEM[0]: lambda check: check._add_last(2),
    pickle.SETITEMS[0]: lambda check: check._add(check._pop_mark()),
    pickle.ADDITEMS[0]: lambda check: check._add(check._pop_mark()),
    pickle.REDUCE[0]: _Check._reduce,
    pickle.NEWOBJ[0]: lambda check: check._new_object(1),
    pickle.NEWOBJ_EX[0]: lambda check: check._new_object(2),
    pickle.BUILD[0]: lambda check: check._add_last(1),
    pickle.BINPERSID[0]: _Check._persistent,
}
"""The steps of the other opcodes."""
