"""An import of PyTorch's that a compile would pay for and seldom needs."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


class _Deferred(types.ModuleType):
    """Stands for a module until it is needed."""

    def __init__(self, spec: importlib.machinery.ModuleSpec, function: str) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        setattr(self, function, lambda *args, **kwargs: getattr(self._imported(), function)(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # an import asks for such
            raise AttributeError(name)
        return getattr(self._imported(), name)

    def _imported(self) -> types.ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)


@contextlib.contextmanager
def deferred(module: str, function: str) -> Iterator[None]:
    """Until the end of the block, who imports the function from the module imports the module by the first call only.

    Any other name is there as well, and imports it at once. Where it was imported before, or is not to be found, nothing changes.
    """
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    if spec is None:
        yield
        return
    sys.modules[module] = stand_in = _Deferred(spec, function)
    try:
        yield
    finally:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
