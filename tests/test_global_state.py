"""No call changes what belongs to the whole process: random states, threads, warning filters, settings of libraries."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import sklearn
import threadpoolctl
import torch
from tabpfn import TabPFNRegressor
from typer.testing import CliRunner

import oretrofit
from oretrofit import cli
from oretrofit.experiments.pretrain import save_host

OPTIONS = {"device": "cpu", "inference_precision": torch.float32, "n_estimators": 2}


def global_state() -> dict[str, Any]:
    """What a caller may have set, as values that can be compared."""
    pools = {pool["filepath"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    return {
        "python's random state": random.getstate(),
        "numpy's random state": str(np.random.get_state(legacy=False)),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "other libraries' threads": pools,
        "warnings": ([*warnings.filters], warnings.showwarning),
        "torch's defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "torch's gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "torch's kernels": (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.mkldnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "scikit-learn": sklearn.get_config(),
        "numpy": (np.geterr(), np.get_printoptions()),
        "pandas": [pd.get_option(name) for name in ("display.width", "display.precision", "mode.string_storage")],
        "matplotlib": dict(dict.items(matplotlib.rcParams)),  # not by key, which chooses a backend
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "logging": (logging.root.level, [*logging.root.handlers]),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "signals": signal.getsignal(signal.SIGINT),
        "recursion": sys.getrecursionlimit(),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_host) -> Path:
    """A folder with a host, a closed retrofit of it and tables."""
    folder = tmp_path_factory.mktemp("state")
    save_host(tiny_host.model, folder / "tiny-v3.safetensors")
    closed = oretrofit.patch(folder / "tiny-v3.safetensors", "closed", tau=1e-3)
    closed.save(folder / "closed.json")
    closed.save_checkpoint(folder / "closed-v3.safetensors")
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"shop": np.repeat(["a", "b"], 15), "x": rng.standard_normal(30)})
    rows["kind"] = rng.choice(["red", "green"], 30)
    rows["y"] = rows["x"] + 0.1 * rng.standard_normal(30)
    rows.iloc[::3].drop(columns="y").to_csv(folder / "test.csv", index=False)
    rows.drop(index=rows.index[::3]).to_csv(folder / "train.csv", index=False)
    return folder


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Some libraries add warning filters or variables of the environment when they are first used: not ours to mend."""
    for name in ("sympy", "requests", "matplotlib.figure", "pyarrow", "tabpfn"):
        pytest.importorskip(name)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1).step()


@pytest.fixture(scope="module")
def closed(tiny_host):
    return oretrofit.patch(tiny_host, "closed", tau=1e-3)


@pytest.fixture
def unchanged(monkeypatch):
    """Compares what there is after the test with what was there before, unlike the defaults where that is safe."""
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setenv("ORETROFIT_TEST", "as it was")
    with warnings.catch_warnings(), sklearn.config_context(transform_output="pandas"), matplotlib.rc_context():
        # In front, and of no warning that is ever given.
        warnings.filterwarnings("error", message="^of no warning$", category=UserWarning)
        matplotlib.rcParams["lines.linewidth"] = 1.25
        before = global_state()
        yield
        after = global_state()
        # What is loaded on first use brings a pool of its own.
        name = "other libraries' threads"
        after[name] = {file: number for file, number in after[name].items() if file in before[name]}
    torch.set_num_threads(threads)
    assert [name for name in before if before[name] != after[name]] == []


def tables(table):
    X, y, X_test = table
    return [X, X[:20], X[:9, :2]] * 3, [y, y[:20], y[:9]] * 3, [X_test, X_test, X_test[:, :2]] * 3


def long_table() -> tuple[pd.DataFrame, pd.Series, pd.DataFrame]:
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"shop": np.repeat(["a", "b"], 12), "x": rng.standard_normal(24)})
    return X, X["x"].rename("y"), X.iloc[::4]


def by_shop(use: Any, **settings: Any) -> Any:
    X, y, X_test = long_table()
    return use.closed.predict_groups(X.assign(y=y), X_test, target="y", by="shop", **OPTIONS, **settings)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


# ---- The library ---------------------------------------------------------------------------------

# Of each public function, and each public name of a `Retrofit`: calls, by what there is to call them with.
CALLS: dict[str, list[Callable[[Any], Any]]] = {
    "load_host": [
        lambda use: oretrofit.load_host("small"),
        lambda use: oretrofit.load_host(use.files / "tiny-v3.safetensors"),
        lambda use: oretrofit.load_host(use.host.model),
        lambda use: oretrofit.load_host(use.regressor(use.host.specs)),
    ],
    "calibrate": [lambda use: oretrofit.calibrate(use.host, tables=1)],
    "patch": [
        lambda use: oretrofit.patch(use.host, "full-o", tables=1),
        lambda use: oretrofit.patch(use.files / "tiny-v3.safetensors", "closed", tau=1e-3),
    ],
    "load": [
        lambda use: oretrofit.load(use.files / "closed.json"),
        lambda use: oretrofit.load(use.files / "closed-v3.safetensors"),
    ],
    "unpatch": [lambda use: oretrofit.unpatch(use.closed.specs.model)],
    "specs": [lambda use: use.predict(use.closed.specs)],
    "host_specs": [lambda use: use.predict(use.closed.host_specs)],
    "lent_specs": [lambda use: use.predict(use.closed.lent_specs)],
    "table": [lambda use: use.closed.table],
    "save": [lambda use: use.closed.save(use.folder / "saved.json")],
    "save_checkpoint": [lambda use: use.closed.save_checkpoint(use.folder / "saved-v3.safetensors")],
    "to_dict": [lambda use: use.closed.to_dict()],
    "RetrofitRegressor": [lambda use: use.estimator().fit(*use.table[:2]).predict(use.table[2])],
    "RetrofitRegressor by": [lambda use: use.estimator(by="shop").fit(*long_table()[:2]).predict(long_table()[2])],
    "predict_ragged": [
        lambda use: use.closed.predict_ragged(*use.tables, n_jobs=0, **OPTIONS),
        lambda use: use.closed.predict_ragged(*use.tables, n_jobs=1, output_type="full", **OPTIONS),
    ],
    "predict_groups": [
        lambda use: by_shop(use, n_jobs=0),
        lambda use: by_shop(use, n_jobs=1, output_type="main"),
    ],
}

FAILURES: dict[str, tuple[type[BaseException], Callable[[Any], Any]]] = {
    "a host that is none": (ValueError, lambda use: oretrofit.load_host(use.files / "train.csv")),
    "a retrofit that is none": (ValueError, lambda use: oretrofit.load(use.files / "train.csv")),
    "tau": (ValueError, lambda use: oretrofit.patch(use.host, "full-o", tau=-1.0)),
    "calibration": (KeyboardInterrupt, lambda use: oretrofit.calibrate(use.host, tables=1, on_table=interrupt)),
    "a bad table": (
        ValueError,
        lambda use: use.closed.predict_ragged(use.tables[0], use.tables[1], use.tables[2][::-1], n_jobs=0, **OPTIONS),
    ),
    "a bad table, in a process": (
        ValueError,
        lambda use: use.closed.predict_ragged(use.tables[0], use.tables[1], use.tables[2][::-1], n_jobs=1, **OPTIONS),
    ),
    "an interruption": (
        KeyboardInterrupt,
        lambda use: use.closed.predict_ragged(*use.tables, n_jobs=1, on_tables=interrupt, **OPTIONS),
    ),
    "an interruption of a pass": (KeyboardInterrupt, lambda use: use.interrupted_pass()),
    "a bad group": (ValueError, lambda use: by_shop(use, min_rows=99)),
}


class Use:
    """What the calls are given."""

    def __init__(self, host, closed, files, folder, table, regressor, predict) -> None:
        self.host, self.closed, self.files, self.folder = host, closed, files, folder
        self.table, self.tables, self.regressor, self.predict = table, tables(table), regressor, predict

    def estimator(self, **parameters: Any) -> Any:
        file = self.files / "tiny-v3.safetensors"
        return oretrofit.RetrofitRegressor(file, tau=1e-3, estimator=TabPFNRegressor(**OPTIONS), **parameters)

    def interrupted_pass(self) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(self.closed.model), "forward", interrupt)
            self.closed.predict_ragged(*self.tables, n_jobs=1, **OPTIONS)


@pytest.fixture(scope="module")
def use(tiny_host, closed, files, tmp_path_factory, table, regressor, predict) -> Use:
    return Use(tiny_host, closed, files, tmp_path_factory.mktemp("saved"), table, regressor, predict)


def test_all_of_the_library_is_here():
    functions = {name for name in oretrofit.__all__ if inspect.isfunction(getattr(oretrofit, name))}
    functions |= {"RetrofitRegressor"}
    methods = {name for name in vars(oretrofit.Retrofit) if not name.startswith("_")}
    fields = {"host", "variant", "model", "sites", "settings", "statistics"}
    assert {name.split()[0] for name in CALLS} == functions | (methods - fields)


@pytest.mark.parametrize(
    "call", [pytest.param(call, id=f"{name} {i}") for name, calls in CALLS.items() for i, call in enumerate(calls)]
)
def test_library(use, call, unchanged):
    call(use)


@pytest.mark.parametrize("name", FAILURES)
def test_after_a_failure(use, name, unchanged):
    error, call = FAILURES[name]
    with pytest.raises(error):
        call(use)


# ---- The commands --------------------------------------------------------------------------------

COMMANDS = [
    "patch --variant closed --tables 1 --host {host} --out {out}/closed.json",
    "eval --suite csv:{files}/train.csv#y --seeds 1 --variant closed --tables 1 --host {host} --out {out}/eval",
    "eval --workers 2 --suite csv:{files}/train.csv#y --seeds 2 --variant oa --tables 1 --host {host} --out {out}/eval",
    "predict --train {files}/train.csv --test {files}/test.csv --target y --by shop --retrofit {files}/closed.json "
    "--out {out}/out.csv",
    "frontier --tables 1 --variant closed --host {host} --plot {out}/frontier.png",
    "ablate --seeds 2 --plot {out}/ablation.png",
    "audit --tables 1 --variant closed --host {host}",
    "pretrain --steps 1 --out {out}/pretrain",
    "bench overhead --rounds 1 --rows 20 --host {host}",
    "bench ragged-equality --tables 2 --host {host}",
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_command(command, files, tmp_path, unchanged):
    options = [] if command.startswith(("predict", "pretrain")) else ["--device", "cpu"]
    filled = command.format(host=files / "tiny-v3.safetensors", files=files, out=tmp_path)
    result = CliRunner().invoke(cli.app, [*filled.split(), *options])
    assert result.exit_code == 0, result.output
