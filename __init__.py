"""Retrofit a pretrained TabPFN v3 regressor so that zero-vector tokens are inert.

```python
from tabpfn import TabPFNRegressor
import oretrofit

retrofit = oretrofit.patch("small", variant="full-o")
regressor = TabPFNRegressor(model_path=retrofit.specs)
```

`patch` returns a `Retrofit`, `Retrofit.save` writes it to a small JSON file, and `load` reads that.
`RetrofitRegressor` does all of it as scikit-learn has it, from parameters that are plain. A retrofit of
the variant `closed` also predicts many tables of different shapes at once: `Retrofit.predict_ragged`,
`Retrofit.predict_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibration.calibration import Calibration
    from .calibration.variants import VARIANTS
    from .patches.structure import Structure
    from .retrofit.api import Retrofit, RetrofitError, calibrate, load, patch
    from .retrofit.estimator import RetrofitRegressor
    from .retrofit.hosts import Host, HostError, load_host
    from .retrofit.patcher import PatchError, Site, unpatch
    from .retrofit.ragged.predicting import TableError
    from .retrofit.ragged.report import RaggedReport
    from .retrofit.tabpfn_api import TabPFNDriftError

__all__ = [
    "VARIANTS",
    "Calibration",
    "Host",
    "HostError",
    "PatchError",
    "RaggedReport",
    "Retrofit",
    "RetrofitError",
    "RetrofitRegressor",
    "Site",
    "Structure",
    "TabPFNDriftError",
    "TableError",
    "calibrate",
    "load",
    "load_host",
    "patch",
    "unpatch",
]

_HOMES = {
    "VARIANTS": "calibration.variants",
    "Calibration": "calibration.calibration",
    "Host": "retrofit.hosts",
    "HostError": "retrofit.hosts",
    "PatchError": "retrofit.patcher",
    "RaggedReport": "retrofit.ragged.report",
    "Retrofit": "retrofit.api",
    "RetrofitError": "retrofit.api",
    "RetrofitRegressor": "retrofit.estimator",
    "Site": "retrofit.patcher",
    "Structure": "patches.structure",
    "TabPFNDriftError": "retrofit.tabpfn_api",
    "TableError": "retrofit.ragged.predicting",
    "calibrate": "retrofit.api",
    "load": "retrofit.api",
    "load_host": "retrofit.hosts",
    "patch": "retrofit.api",
    "unpatch": "retrofit.patcher",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and TabPFN take seconds, and `oretrofit --help` needs neither.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
