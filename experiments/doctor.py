"""`oretrofit doctor`: whether all that a retrofit needs is here and works, in a form to be sent to somebody else.

Nothing is downloaded, no token is shown, and no path but those of cache folders, with the home folder as `~`.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from ..retrofit.printing import Cells

# Two tables in one padded pass of a closed retrofit, against the unpatched host one by one, in standard deviations of
# the targets. A gate at tau = 1e-8 takes at most 1e-6 off a carrier's presence (the smallest ||h||^2 are about 1e-2),
# and there are some thirty sites in a row; a host that reads the padding is off by 0.1 and more.
SIZES = ((20, 2), (40, 5)), ((4, 2), (9, 5))  # rows and columns to fit and to predict
TAU = 1e-8
LARGEST_SHIFT = 1e-3


def examine(on_section: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Look at everything in `SECTIONS`, and never raise for what is broken.

    Returns:
        For each section what was found, by name, and `problems`: what is broken, in sentences.
    """
    found: dict[str, Any] = {}
    problems = []
    for name, look in SECTIONS.items():
        if on_section is not None:
            on_section(name)
        try:
            found[name] = look()
        except Exception as error:  # of whatever is broken: other packages, a driver, the file system
            reason = _anonymous(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            found[name] = {"broken": reason}
            problems.append(f"{name}: {reason}")
    return {**found, "problems": problems}


def report_cells(found: dict[str, Any]) -> Cells:
    """Header and cells of what `examine` found, all of them text."""
    cells = [
        [section if i == 0 else "", name, str(value)]
        for section in SECTIONS
        for i, (name, value) in enumerate(found[section].items())
    ]
    return ["", "what", "found"], cells


def _versions() -> dict[str, str]:
    lines = [line for line in requires("oretrofit") or () if not re.search("extra == .dev", line)]
    named = dict.fromkeys(re.split(r"[^\w-]", line)[0] for line in lines)
    found = {"oretrofit": version("oretrofit"), "Python": platform.python_version(), "system": platform.platform()}
    for name in named:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _torch() -> dict[str, Any]:
    import torch

    from ..calibration.predicting import resolve_device
    from ..retrofit.tabpfn_api import infer_autocast_inference_mode

    device = torch.device(resolve_device("auto"))
    return {
        "build": torch.__version__,
        "CUDA of the build": torch.version.cuda or "none",
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "MKL": "yes" if torch.backends.mkl.is_available() else "no",
        "precision auto": "autocast" if infer_autocast_inference_mode([device], enable=None) else "float32",
    }


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"CUDA": "no device"}
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        f"cuda:{i}": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        for i, gpu in enumerate(devices)
    }


def _threads() -> dict[str, Any]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    named = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY") if name in os.environ]
    return {"cores": usable, "torch": torch.get_num_threads(), **{name: os.environ[name] for name in named}}


def _hosts() -> dict[str, str]:
    from ..retrofit.hosts import find_hosts

    return {host["host"]: f"{'yes' if host['available'] else 'no'}: {host['where']}" for host in find_hosts()}


def _licence() -> dict[str, str]:
    from ..retrofit.tabpfn_api import has_token

    return {"token for Prior Labs' licence": "set" if has_token() else "not set"}


def _caches() -> dict[str, str]:
    from ..retrofit.hosts import shortened
    from ..retrofit.tabpfn_api import prior_labs_path

    found = {"TabPFN": prior_labs_path("v3").parent}
    try:
        import openml
    except Exception:  # it makes its folders when imported
        return {"TabPFN": shortened(found["TabPFN"]), "OpenML": "the package cannot be imported"}
    found["OpenML"] = Path(openml.config.get_cache_directory())
    return {name: f"{shortened(path)}{'' if path.is_dir() else ' (not there yet)'}" for name, path in found.items()}


def _internals() -> dict[str, str]:
    from ..retrofit.tabpfn_api import drift

    if differing := drift():
        raise ValueError(
            f"of TabPFN {version('tabpfn')} {', '.join(differing)} differ from what the patches were written for; "
            "nothing can be patched. Install tabpfn 9.2.0, or see CONTRIBUTING.md"
        )
    return {"TabPFN": "as the patches were written for"}


def _self_test() -> dict[str, str]:
    import numpy as np
    import torch

    from ..calibration.predicting import fit_and_predict, resolve_device
    from ..retrofit.api import patch

    rng = np.random.default_rng(0)
    X_trains, X_tests = ([rng.normal(size=(rows, columns)) for rows, columns in sizes] for sizes in SIZES)
    y_trains = [X[:, 0] + 0.1 * rng.normal(size=len(X)) for X in X_trains]
    options: dict[str, Any] = {"n_estimators": 1, "inference_precision": torch.float64}
    retrofit = patch("small", "closed", tau=TAU)
    found = {}
    for device in dict.fromkeys(["cpu", resolve_device("auto")]):
        start = time.perf_counter()
        together = retrofit.predict_ragged(X_trains, y_trains, X_tests, device=device, n_jobs=0, **options)
        shift = 0.0
        for X, y, X_test, mean in zip(X_trains, y_trains, X_tests, together, strict=True):
            host = fit_and_predict(retrofit.host_specs, X, y, X_test, device=device, **options)
            shift = max(shift, float(np.abs(mean - host).max() / y.std()))
        said = f"two tables padded into one pass are {shift:.1g} target standard deviations from the host one by one"
        if not shift <= LARGEST_SHIFT:
            raise ValueError(f"on {device} {said}, not at most {LARGEST_SHIFT:g}")
        found[device] = f"passed in {time.perf_counter() - start:.1f} s: {said}"
    return found


def _anonymous(text: str) -> str:
    return text.replace(str(Path.home()), "~")


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": _versions,
    "torch": _torch,
    "GPU": _gpus,
    "threads": _threads,
    "hosts": _hosts,
    "licence": _licence,
    "cache folders": _caches,
    "internals": _internals,
    "self-test": _self_test,
}
