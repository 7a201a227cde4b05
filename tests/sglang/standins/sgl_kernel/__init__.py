"""Stands in for SGLang's compiled kernels, which need CUDA: every name can be imported, and raises when it is called."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU")


class _Kernels(ModuleType):
    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _Submodules:
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls, is_package=True) if name.startswith("sgl_kernel.") else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Kernels(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Kernels
sys.meta_path.append(_Submodules)  # type: ignore[arg-type]
