"""Retrofit a pretrained TabPFN v3 regressor so that zero-vector tokens are inert.

    from tabpfn import TabPFNRegressor
    import oretrofit

    retrofit = oretrofit.patch("small", variant="full-o")
    regressor = TabPFNRegressor(model_path=retrofit.specs)

`patch` returns a `Retrofit`, `Retrofit.save` writes it to a small JSON file, and `load` reads that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .retrofit.api import Retrofit, load, patch
    from .retrofit.hosts import Host, load_host

__all__ = ["Host", "Retrofit", "load", "load_host", "patch"]

_HOMES = {"patch": "api", "load": "api", "Retrofit": "api", "load_host": "hosts", "Host": "hosts"}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and TabPFN take seconds, and `oretrofit --help` needs neither.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".retrofit.{_HOMES[name]}", __name__), name)
