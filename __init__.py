"""Retrofit a pretrained TabPFN v3 regressor so that zero-vector tokens are inert.

    from tabpfn import TabPFNRegressor
    import oretrofit

    retrofit = oretrofit.patch("small", variant="full-o")
    regressor = TabPFNRegressor(model_path=retrofit.specs)

`patch` returns a `Retrofit`, `Retrofit.save` writes it to a small JSON file, and `load` reads that. A retrofit of
the variant `closed` also predicts many tables of different shapes at once: `Retrofit.predict_ragged`,
`Retrofit.predict_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .retrofit.api import Retrofit, load, patch
    from .retrofit.hosts import Host, load_host
    from .retrofit.ragged import RaggedReport, TableError

__all__ = ["Host", "RaggedReport", "Retrofit", "TableError", "load", "load_host", "patch"]

_HOMES = {
    "patch": "api",
    "load": "api",
    "Retrofit": "api",
    "load_host": "hosts",
    "Host": "hosts",
    "RaggedReport": "ragged",
    "TableError": "ragged",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and TabPFN take seconds, and `oretrofit --help` needs neither.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".retrofit.{_HOMES[name]}", __name__), name)
