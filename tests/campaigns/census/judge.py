"""Judges how epload loads one class: against the model built normally, and against what ``from_pretrained`` computes."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from campaigns.census.classes import resolve
from campaigns.census.shrink import candidates, copy_of
from support.checks import same_bits
from support.recordings import tensors_of

LIMIT = 64_000_000
"""Parameters of a model that is judged."""
SEED = 2026
PATIENCE = 60.0
"""Seconds of a processor for building one class, over all rungs."""
Tensors = dict[str, Tensor]


@dataclass
class Verdict:
    """The judgment on one class."""

    name: str
    kind: str = "right"
    """``"right"``, ``"wrong"``, ``"raising"`` or ``"does not build"``."""
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Findings that are not held against epload: what the library itself does not get right, or does differently on purpose."""
    seconds: float = 0.0

    def wrong(self, text: str) -> None:
        self.kind = "wrong"
        self.findings.append(text)


def judge(name: str, places: list[tuple[str, str]]) -> Verdict:
    """``places``: the Auto tables that name the class; see :func:`census.classes.auto_classes`."""
    began = time.perf_counter()
    verdict = Verdict(name)
    try:
        built = _build(name, places)
    except Exception as error:
        verdict.kind, verdict.findings = "does not build", [_text(error)]
        return verdict
    try:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="epload-census-", dir=memory) as folder:
            case = _Case(verdict, *built, Path(folder))
            case.whole()
            case.partial()
            case.reduced()
    except Exception as error:
        verdict.kind = "raising"
        verdict.findings.append(_text(error) + "\n" + traceback.format_exc()[-1500:])
    verdict.seconds = round(time.perf_counter() - began, 2)
    return verdict


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


# ---- building ----


class TooLarge(Exception):
    """A model that would take too long to judge."""


def _build(name: str, places: list[tuple[str, str]]) -> tuple[type[Any], Any, nn.Module]:
    """Returns the class, a configuration and the model built normally from it, on the first rung where that works.

    Raises:
        Exception: none builds; what the first rung of the ladder raised.
    """
    from transformers import PreTrainedModel

    model_class, config_classes = resolve(places, name)
    if not issubclass(model_class, PreTrainedModel):
        raise TypeError(f"{name} is no PreTrainedModel")
    failures: list[Exception] = []
    began = time.thread_time()
    for rung, make in (candidate for config_class in config_classes for candidate in candidates(config_class)):
        if time.thread_time() - began > PATIENCE:
            break
        try:
            config = make()
            for build in (on_meta, _normally):
                try:
                    model = build(model_class, config)
                except ImportError:
                    raise
                except Exception:
                    if build is _normally:  # some classes cannot be made on meta; those are small
                        raise
                    continue
                if (number := sum(parameter.numel() for parameter in model.parameters())) > LIMIT:
                    raise TooLarge(f"{number / 1e6:.0f} million parameters with {rung}")
            return model_class, config, model
        except ImportError:
            raise
        except Exception as error:
            failures.append(error)
    raise next((error for error in failures if not isinstance(error, TooLarge)), failures[0])


def _normally(model_class: type[Any], config: Any) -> nn.Module:
    torch.manual_seed(SEED)
    model: nn.Module = model_class(copy_of(config))
    return model.eval()


def on_meta(model_class: type[Any], config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """Makes a model as a user does who is to load it; those that compute with values on the way as the library does."""
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


# ---- comparing ----


@contextmanager
def poisoned() -> Iterator[None]:
    """Has torch fill memory that it allocates with NaN or the largest integer, so that what nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def is_garbage(tensor: Tensor) -> bool:
    """True if a tensor still holds some of the poison."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())


def unsaved(model: nn.Module) -> set[str]:
    """Returns the names of the buffers that are not persistent."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def _few(tensor: Tensor | None) -> str:
    if tensor is None or tensor.is_meta:
        return "absent" if tensor is None else "on meta"
    values = ", ".join(f"{value:.4g}" for value in tensor.detach().reshape(-1)[:4].tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} [{values}{', ...' if tensor.numel() > 4 else ''}]"


# ---- one class ----


class _Case:
    """One class, built normally."""

    def __init__(self, verdict: Verdict, model_class: type[Any], config: Any, model: nn.Module, folder: Path) -> None:
        self._verdict = verdict
        self._class, self._config, self._folder = model_class, config, folder
        self._model = model
        self._tensors = tensors_of(model)
        self._unsaved = unsaved(model)

    def whole(self) -> None:
        """Judges a load of everything, as ``save_pretrained`` writes it."""
        folder = self._folder / "whole"
        try:
            self._model.save_pretrained(folder)  # type: ignore[operator]
        except Exception as error:
            self._verdict.notes.append(f"save_pretrained: {_text(error)}; saved as the model has it")
            self._save(folder, self._state())
        loaded, _ = self._load(folder, strict=True)
        differing = [name for name, tensor in loaded.items() if not same_bits(tensor, self._tensors[name])]
        oracle = self._oracle(folder) if differing else {}
        for name in differing:
            if same_bits(loaded[name], oracle.get(name)):
                self._verdict.notes.append(f"{name} is not as built, but as from_pretrained has it")
                continue
            self._report("whole", name, loaded[name], oracle)

    def partial(self) -> None:
        """Judges a load from a checkpoint that lacks a few tensors and holds the others under the model's own names."""
        dropped, state, folder = self._dropped(), self._state(), self._folder / "partial"
        self._save(folder, {name: tensor for name, tensor in state.items() if name not in dropped})
        oracle = self._oracle(folder)
        try:
            loaded, reported = self._load(folder, strict=False)
        except epload.ModelMismatch as error:
            # The library initializes some parameters nowhere but where a model is made, and from_pretrained leaves them as
            # garbage. An error that names them is what is wanted.
            never = {name for name in dropped if name in oracle and is_garbage(oracle[name]) and name in str(error)}
            if not never:
                raise
            self._verdict.notes.append(f"{', '.join(sorted(never))}: garbage in from_pretrained, refused here")
            dropped -= never
            folder = self._folder / "fewer"
            self._save(folder, {name: tensor for name, tensor in state.items() if name not in dropped})
            oracle = self._oracle(folder)
            loaded, reported = self._load(folder, strict=False)
        missing = {alias for name in dropped for alias in self._names_of(name)}
        for name, tensor in loaded.items():
            if same_bits(tensor, oracle.get(name)):
                continue  # it may take another key for a missing one
            if name in missing and tensor.numel() and not reported & self._names_of(name):
                self._verdict.wrong(f"partial: {name} is missing and not reported as initialized")
            if same_bits(tensor, self._tensors[name]):
                continue
            if name in missing or name in self._unsaved:
                self._judge_computed(name, tensor, oracle, folder)
            else:
                self._report("partial", name, tensor, oracle)

    def reduced(self) -> None:
        """Judges models of other dtypes than the checkpoint's, and one of the dtype of a checkpoint saved of such a model.

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
            loaded, _ = self._load(source, strict=True, dtype=own)
            for name in sorted(set(expected) & set(loaded)):
                got, want = loaded[name], expected[name]
                if got.dtype != want.dtype or (name not in self._unsaved and not same_bits(got, want)):
                    self._verdict.wrong(f"dtype={dtype!r}: {name} is {_few(got)}, from_pretrained has {_few(want)}")

    def _report(self, case: str, name: str, got: Tensor, oracle: Tensors) -> None:
        kind = "buffer that is not persistent" if name in self._unsaved else "tensor"
        built, theirs = _few(self._tensors[name]), _few(oracle.get(name))
        self._verdict.wrong(f"{case}: the {kind} {name} is {_few(got)}; built {built}, from_pretrained has {theirs}")

    def _judge_computed(self, name: str, got: Tensor, oracle: Tensors, folder: Path) -> None:
        """Compares what the checkpoint lacks: like the library's where that is deterministic, else of its distribution."""
        built, theirs = self._tensors[name], oracle.get(name)
        if theirs is not None and is_garbage(theirs):
            self._verdict.notes.append(f"partial: {name} is garbage in from_pretrained")
            theirs = None
        if is_garbage(got):
            if theirs is not None or name not in oracle or not is_garbage(built):
                self._report("partial", name, got, oracle)
            return
        expected = built if theirs is None else theirs
        fixed = theirs is not None and same_bits(theirs, self._oracle(folder, SEED + 3).get(name))
        if fixed or not got.is_floating_point() or bool(got.isfinite().all()) != bool(expected.isfinite().all()):
            self._report("partial", name, got, oracle)
        elif got.numel() >= 64:
            ours, want = float(got.float().std()), float(expected.float().std())
            if not (0.5 * want <= ours <= 2 * want):
                self._verdict.wrong(f"partial: {name} has the standard deviation {ours:.4g} instead of {want:.4g}")

    # ---- steps ----

    def _state(self) -> Tensors:
        """Returns the state of the model built normally, each tensor once, under the first of its names."""
        first: dict[tuple[int, int, tuple[int, ...]], str] = {}
        state: Tensors = {}
        for name, tensor in self._model.state_dict().items():
            if isinstance(tensor, Tensor):
                key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
                if not tensor.numel() or first.setdefault(key, name) == name:
                    state[name] = tensor.detach().clone().contiguous()
        return state

    def _dropped(self) -> set[str]:
        """Returns the last tensor and the first, some with several dims and some with a single one, and one buffer."""
        names = list(self._state())
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        weights = [name for name in names if name in parameters and parameters[name].ndim > 1]
        vectors = [name for name in names if name in parameters and parameters[name].ndim < 2]
        buffers = [name for name in names if name not in parameters]
        chosen = {*names[:1], *names[-1:], *weights[-1:], *vectors[-1:]}
        for some in (weights, vectors, buffers):
            chosen |= set(some[len(some) // 2 : len(some) // 2 + 1])
        return chosen if len(names) > len(chosen) else set(names[:1]) if len(names) > 1 else set()

    def _names_of(self, name: str) -> set[str]:
        """Returns the names of the same tensor."""
        return {other for other, candidate in self._tensors.items() if candidate is self._tensors[name]}

    def _save(self, folder: Path, state: Tensors) -> None:
        folder.mkdir(exist_ok=True)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        self._model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]

    def _load(self, folder: Path, strict: bool, dtype: torch.dtype | None = None) -> tuple[Tensors, set[str]]:
        """Returns the loaded tensors, once structure, ties and devices are judged, and which were reported as initialized."""
        model = on_meta(self._class, self._config, dtype)
        torch.manual_seed(SEED + 2)
        with poisoned():
            report = epload.load(model, folder, strict=strict, progress=False)
        loaded = tensors_of(model)
        if set(loaded) != set(self._tensors):
            self._verdict.wrong(f"names differ: {sorted(set(loaded) ^ set(self._tensors))[:5]}")
        loaded = {name: tensor for name, tensor in loaded.items() if name in self._tensors}
        for name, tensor in loaded.items():
            if any(loaded.get(other) is not tensor for other in self._names_of(name)):
                self._verdict.wrong(f"{name} is not one tensor with {sorted(self._names_of(name))} any more")
            if tensor.is_meta or hasattr(tensor, "_is_hf_initialized"):
                self._verdict.wrong(f"{name} is left on meta, or with the library's mark")
        return {name: tensor for name, tensor in loaded.items() if not tensor.is_meta}, set(report.initialized)

    def _oracle(self, folder: Path, seed: int = SEED + 4) -> Tensors:
        """Returns what ``from_pretrained`` makes of a folder; nothing if it raises."""
        torch.manual_seed(seed)
        try:
            with poisoned():
                return tensors_of(self._class.from_pretrained(folder, dtype=torch.float32))
        except Exception as error:
            self._verdict.notes.append(f"from_pretrained of {folder.name}: {_text(error)}")
            return {}
