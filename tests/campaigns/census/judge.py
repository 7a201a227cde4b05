"""Judges how epload loads one class: against the model built normally, and against what ``from_pretrained`` computes."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from campaigns.census.classes import resolve
from campaigns.census.shrink import Rung, candidates, copy_of

LIMIT = 64_000_000
"""Parameters of a model that is judged."""
POISON = 0x7F
"""Every byte of freshly allocated memory: 3.4e38 as float32 and bfloat16, NaN as float16, a large number as an integer."""
SEED = 2026
PATIENCE = 60.0
"""Seconds for building one class, over all rungs."""


@dataclass
class Verdict:
    """What became of one class."""

    name: str
    kind: str = "right"
    """``"right"``, ``"wrong"``, ``"raising"`` or ``"does not build"``."""
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Not held against epload: what the library itself does not get right, or does differently on purpose."""
    parameters: int = 0
    rung: str = ""
    seconds: float = 0.0

    def wrong(self, text: str) -> None:
        self.kind = "wrong"
        self.findings.append(text)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(name: str, places: list[tuple[str, str]]) -> Verdict:
    """``places``: the Auto tables that name the class; see :func:`census.classes.auto_classes`."""
    began = time.perf_counter()
    verdict = Verdict(name)
    try:
        built = _build(name, places, verdict)
    except Exception as error:
        verdict.kind, verdict.findings = "does not build", [_text(error)]
        built = None
    if built is not None:
        try:
            with tempfile.TemporaryDirectory(prefix="epload-census-", dir=_memory()) as folder:
                _Case(verdict, *built, Path(folder)).judge()
        except Exception as error:
            verdict.kind = "raising"
            verdict.findings.append(_text(error) + "\n" + traceback.format_exc()[-1500:])
    verdict.seconds = round(time.perf_counter() - began, 2)
    return verdict


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


# ---- building ----


def _build(name: str, places: list[tuple[str, str]], verdict: Verdict) -> tuple[type[Any], Any, nn.Module]:
    """The class, a configuration and the model built normally from it.

    Raises:
        Exception: none builds; what the first rung of the ladder raised.
    """
    model_class, config_classes = resolve(places, name)
    if not issubclass(model_class, _pretrained()):
        raise TypeError(f"{name} is no PreTrainedModel")
    failures: list[Exception] = []
    began = time.perf_counter()
    for config_class in config_classes:
        for rung, make in candidates(config_class):
            if time.perf_counter() - began > PATIENCE:
                break
            try:
                config = make()
                _check_size(on_meta(model_class, config), rung)
            except ImportError:
                raise
            except Exception as error:
                # Some classes cannot be made on meta; those are small.
                failures.append(error)
                if isinstance(error, TooLarge):
                    continue
            try:
                model = _normally(model_class, config)
                _check_size(model, rung)
            except ImportError:
                raise
            except Exception as error:
                failures.append(error)
                continue
            verdict.parameters = sum(parameter.numel() for parameter in model.parameters())
            verdict.rung = str(rung)
            return model_class, config, model
    raise next((error for error in failures if not isinstance(error, TooLarge)), failures[0])


class TooLarge(Exception):
    """A model that would take too long to judge."""


def _check_size(model: nn.Module, rung: Rung) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LIMIT:
        raise TooLarge(f"{count / 1e6:.0f} million parameters with {rung}")


def _pretrained() -> type[Any]:
    from transformers import PreTrainedModel

    return PreTrainedModel


def _normally(model_class: type[Any], config: Any) -> nn.Module:
    torch.manual_seed(SEED)
    model: nn.Module = model_class(copy_of(config))
    return model.eval()


def on_meta(model_class: type[Any], config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """As a user makes a model that is to be loaded; those that compute with values on the way as the library makes them."""
    from transformers import initialization

    def make() -> nn.Module:
        own = copy_of(config)
        model: nn.Module = model_class(own) if dtype is None else model_class._from_config(own, dtype=dtype)
        return model.eval()

    torch.manual_seed(SEED + 1)
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        with torch.device("meta"), initialization.meta_device_safe_creation_ops():
            return make()


# ---- garbage that shows ----


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory that torch allocates without a value with :data:`POISON`, so that what nobody writes is seen."""

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() and "out" not in options:
                storage = tensor.untyped_storage()
                if tensor.dtype == torch.bool:
                    tensor.fill_(True)
                else:
                    torch.tensor([], dtype=torch.uint8).set_(storage).fill_(POISON)  # type: ignore[call-overload]
            return tensor

        return made

    names = ("empty", "empty_strided", "empty_like")
    kept = {name: getattr(torch, name) for name in names}
    for name in names:
        setattr(torch, name, filling(kept[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(torch, name, kept[name])


def is_garbage(tensor: Tensor) -> bool:
    """Whether it still holds some of the poison, in a run as long as an element."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    raw = _bytes(tensor).reshape(-1, tensor.element_size())
    return tensor.element_size() > 1 and bool((raw == POISON).all(1).any())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


# ---- one class ----


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under each of their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def unsaved(model: nn.Module) -> set[str]:
    """Names of the buffers that are not persistent."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def attributes_on_meta(model: nn.Module) -> set[str]:
    """Tensors on meta that are plain attributes of modules: no load knows of them."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    }


def initialized(report: Any) -> list[str]:
    names: list[str] = report.initialized
    return names


class _Case:
    """One class, built normally."""

    def __init__(self, verdict: Verdict, model_class: type[Any], config: Any, model: nn.Module, folder: Path) -> None:
        self._verdict = verdict
        self._class, self._config, self._folder = model_class, config, folder
        self._model = model
        self._tensors = tensors_of(model)
        self._unsaved = unsaved(model)
        self._oracles: dict[str, dict[str, Tensor] | None] = {}

    def judge(self) -> None:
        self._whole()
        self._partial()
        self._reduced()

    def _whole(self) -> None:
        """Everything is in the checkpoint, as ``save_pretrained`` writes it."""
        folder = self._folder / "whole"
        try:
            self._model.save_pretrained(folder)
        except Exception as error:
            self._verdict.notes.append(f"save_pretrained: {_text(error)}; saved as the model has it")
            self._save(folder, self._state())
        loaded, report = self._load(folder, strict=True)
        differing = []
        for name, got in self._compare(loaded, report):
            want = self._tensors[name]
            if same(got, want):
                continue
            differing.append(name)
        if differing:
            oracle = self._oracle("whole", folder)
            for name in differing:
                got = tensors_of(loaded)[name]
                if oracle is not None and name in oracle and same(got, oracle[name]):
                    self._verdict.notes.append(f"{name} is not as built, but as from_pretrained has it")
                    continue
                kind = "buffer that is not persistent" if name in self._unsaved else "loaded tensor"
                theirs = "" if oracle is None else f", from_pretrained's {_few(oracle.get(name))}"
                garbage = "garbage, " if is_garbage(got) else ""
                self._verdict.wrong(
                    f"whole: {name} ({kind}): {garbage}{_few(got)}; built {_few(self._tensors[name])}{theirs}"
                )

    def _partial(self) -> None:
        """A few tensors are missing from the checkpoint, which holds the others under the model's own names."""
        dropped = self._dropped()
        folder = self._folder / "partial"
        state = self._state()
        self._save(folder, {name: tensor for name, tensor in state.items() if name not in dropped})
        oracle = self._oracle("partial", folder)
        try:
            loaded, report = self._load(folder, strict=False)
        except epload.ModelMismatch as error:
            # The library initializes some parameters nowhere but where a model is made, and from_pretrained leaves them as
            # garbage. An error that names them is what is wanted.
            never = {name for name in dropped if oracle and is_garbage(oracle[name]) and name in str(error)}
            if not never:
                raise
            self._verdict.notes.append(f"{', '.join(sorted(never))}: garbage in from_pretrained, refused here")
            dropped -= never
            folder = self._folder / "fewer"
            self._save(folder, {name: tensor for name, tensor in state.items() if name not in dropped})
            oracle = self._oracle("fewer", folder)
            loaded, report = self._load(folder, strict=False)
        gone = self._aliases(dropped)
        reported = set(initialized(report))
        for name, got in self._compare(loaded, report):
            want = self._tensors[name]
            if name not in gone and name not in self._unsaved:
                if not same(got, want) and not (oracle and name in oracle and same(got, oracle[name])):
                    self._verdict.wrong(f"partial: {name} was loaded, but is {_few(got)} instead of {_few(want)}")
                continue
            as_theirs = (
                oracle is not None and name in oracle and same(got, oracle[name])
            )  # it takes another key for this one
            if name in gone and got.numel() and not reported & self._names_of(name) and not as_theirs:
                self._verdict.wrong(f"partial: {name} is missing and not reported as initialized")
            self._judge_computed(name, got, oracle, folder)

    def _reduced(self) -> None:
        """Models of other dtypes than the checkpoint's, and one of the dtype of a checkpoint that was saved of such a model.

        Parameters and buffers have the dtypes of ``from_pretrained``, and those in the checkpoint its values.
        """
        whole, folder = self._folder / "whole", self._folder / "reduced"
        for dtype, source in ((torch.float16, whole), (torch.bfloat16, whole), ("auto", folder)):
            try:
                with poisoned():
                    oracle = self._class.from_pretrained(source, dtype=dtype)
                own = oracle.config.dtype  # before it is saved, which sets that of the first parameter
                oracle.save_pretrained(folder)
            except Exception as error:
                self._verdict.notes.append(f"from_pretrained(dtype={dtype!r}): {_text(error)}")
                return
            expected = tensors_of(oracle)
            loaded = tensors_of(self._load(source, strict=True, dtype=own)[0])
            for name in sorted(set(expected) & set(loaded)):
                got, want = loaded[name], expected[name]
                if got.dtype != want.dtype or (name not in self._unsaved and not same(got, want)):
                    self._verdict.wrong(f"dtype={dtype!r}: {name} is {_few(got)}, from_pretrained has {_few(want)}")

    def _judge_computed(self, name: str, got: Tensor, oracle: dict[str, Tensor] | None, folder: Path) -> None:
        """What the checkpoint lacks: like the library's where that is deterministic, else of its distribution."""
        built = self._tensors[name]
        theirs = oracle.get(name) if oracle is not None else None
        if same(got, built) or (theirs is not None and same(got, theirs)):
            return
        if is_garbage(got):
            if theirs is not None and is_garbage(theirs) and is_garbage(built):
                self._verdict.notes.append(f"partial: {name} is garbage in from_pretrained too")
                return
            self._verdict.wrong(f"partial: {name} is garbage: {_few(got)}; built {_few(built)}")
            return
        if theirs is not None and is_garbage(theirs):
            self._verdict.notes.append(f"partial: {name} is garbage in from_pretrained")
            theirs = None
        expected = theirs if theirs is not None else built
        again = (self._oracle("again", folder) or {}).get(name) if theirs is not None else None
        if again is not None and theirs is not None and same(theirs, again):
            self._verdict.wrong(
                f"partial: {name} is {_few(got)}, from_pretrained has {_few(theirs)}, built {_few(built)}"
            )
            return
        if not got.is_floating_point():
            self._verdict.wrong(f"partial: {name} is {_few(got)} instead of {_few(expected)}")
            return
        if bool(got.isfinite().all()) != bool(expected.isfinite().all()):
            self._verdict.wrong(f"partial: {name} is not finite: {_few(got)} instead of {_few(expected)}")
        if got.numel() < 64:
            return
        ours, want = float(got.float().std()), float(expected.float().std())
        if not (0.5 * want <= ours <= 2 * want):
            self._verdict.wrong(f"partial: {name} has the standard deviation {ours:.4g} instead of {want:.4g}")

    # ---- steps ----

    def _state(self) -> dict[str, Tensor]:
        """Of the model built normally, each tensor once, under the first of its names."""
        kept: dict[tuple[int, int, tuple[int, ...]], str] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            if not isinstance(tensor, Tensor):
                continue
            key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
            if tensor.numel() and kept.setdefault(key, name) != name:
                continue
            state[name] = tensor.detach().clone().contiguous()
        return state

    def _dropped(self) -> set[str]:
        """The last tensor and the first, one with several dims and one with a single one, and one buffer."""
        names = list(self._state())
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        weights = [name for name in names if name in parameters and parameters[name].ndim > 1]
        vectors = [name for name in names if name in parameters and parameters[name].ndim < 2]
        buffers = [name for name in names if name not in parameters]
        wanted = [*names[:1], *names[-1:], *weights[-1:]]
        for some in (weights, vectors, buffers):
            wanted += some[len(some) // 2 : len(some) // 2 + 1]
        if vectors:
            wanted.append(vectors[-1])
        return set(wanted) if len(names) > len(set(wanted)) else set(names[:1]) if len(names) > 1 else set()

    def _aliases(self, names: set[str]) -> set[str]:
        """These and the other names of the same tensors."""
        return {alias for name in names for alias in self._names_of(name)}

    def _names_of(self, name: str) -> set[str]:
        tensor = self._tensors[name]
        return {other for other, candidate in self._tensors.items() if candidate is tensor}

    def _save(self, folder: Path, state: dict[str, Tensor]) -> None:
        folder.mkdir(exist_ok=True)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        self._model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]

    def _load(self, folder: Path, strict: bool, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
        model = on_meta(self._class, self._config, dtype)
        torch.manual_seed(SEED + 2)
        with poisoned():
            report = epload.load(model, folder, strict=strict, progress=False)
        return model, report

    def _compare(self, loaded: nn.Module, report: Any) -> Iterator[tuple[str, Tensor]]:
        """The loaded tensors, once structure, ties and devices are judged."""
        got = tensors_of(loaded)
        if set(got) != set(self._tensors):
            self._verdict.wrong(f"names differ: {sorted(set(got) ^ set(self._tensors))[:5]}")
        first: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            other = first.setdefault(id(tensor), name)
            if other != name and name in got and other in got and got[name] is not got[other]:
                self._verdict.wrong(f"{name} and {other} are not one tensor any more")
        reported = set(initialized(report))
        for name, tensor in got.items():
            if name not in self._tensors:
                continue
            if tensor.is_meta:
                self._verdict.wrong(f"{name} is left on meta")
                continue
            if hasattr(tensor, "_is_hf_initialized"):
                self._verdict.wrong(f"{name} is left with the library's mark")
            if (
                name in self._unsaved
                and name not in reported
                and name in unsaved(loaded)
                and not reported & self._names_of(name)
            ):
                self._verdict.notes.append(f"{name} is not reported as initialized")
            yield name, tensor

    def _oracle(self, key: str, folder: Path) -> dict[str, Tensor] | None:
        """What ``from_pretrained`` makes of a folder, or None if it raises."""
        if key not in self._oracles:
            torch.manual_seed(SEED + (3 if key == "again" else 4))
            try:
                with poisoned():
                    self._oracles[key] = tensors_of(self._class.from_pretrained(folder, dtype=torch.float32))
            except Exception as error:
                self._verdict.notes.append(f"from_pretrained of the {key} folder: {_text(error)}")
                self._oracles[key] = None
        return self._oracles[key]


def _few(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    if tensor.is_meta:
        return "on meta"
    values = ", ".join(f"{value:.4g}" for value in tensor.detach().reshape(-1)[:4].tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} [{values}{', ...' if tensor.numel() > 4 else ''}]"
