"""`patch`, `load` and the `Retrofit` they return."""

from __future__ import annotations

import copy
import json
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import joblib
import pandas as pd
import torch
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs
from torch import nn

from ..calibration import settings
from ..calibration.calibration import Calibration
from ..calibration.variants import check_variant
from . import tabpfn_api
from .hosts import Host, HostError, HostLike, load_host, weights_sha256
from .patcher import Site, carriers, check_tau, model_taus, patch_model
from .ragged.groups import predict_groups
from .ragged.predicting import predict_ragged

_FORMAT = "oretrofit-1"
_FIT_SUFFIX = ".tabpfn_fit"
_FIT_MEMBERS = ("init_params.json", "fitted_attrs.joblib", "executor_state.joblib")


class RetrofitError(ValueError):
    """A retrofit file that cannot be used: not one, of another version, or made for other weights."""


@dataclass
class Retrofit:
    """A patched clone of a host, and how it was made.

    Attributes:
        host: The host; its model is never touched.
        variant: `oa`, `full-o` or `closed`.
        model: The patched clone. Give estimators `specs`, not this.
        sites: Every patched carrier with its tau.
        settings: What tau was chosen with.
        statistics: Per site, quantiles of `||h||^2` and presence on the calibration tables; empty
            where tau was given.
    """

    host: Host = field(repr=False)
    variant: str
    model: nn.Module = field(repr=False)
    sites: list[Site] = field(repr=False)
    settings: dict[str, Any]
    statistics: dict[str, dict[str, float]] = field(default_factory=dict, repr=False)

    @property
    def specs(self) -> ModelSpecs:
        """A fresh copy of the patched model for `TabPFNRegressor(model_path=...)`.

        A copy each time: TabPFN's engines cast the model they run to another precision in place.
        """
        return self.host.specs_with(self.model)

    @property
    def host_specs(self) -> ModelSpecs:
        """The same for the unpatched host."""
        return self.host.specs

    @property
    def table(self) -> pd.DataFrame:
        """One row a site: name, carrier, classes, tau and, where calibrated, the statistics."""
        return pd.DataFrame([asdict(site) | self.statistics.get(site.name, {}) for site in self.sites])

    def save(self, path: str | Path) -> None:
        """Write the retrofit as JSON: the host's identity, variant, taus, settings; no weights."""
        content = {
            "format": _FORMAT,
            "host": {"name": self.host.name, "sha256": self.host.sha256},
            "variant": self.variant,
            "tau": {site.name: site.tau for site in self.sites},
            "calibration": self.settings,
            "statistics": self.statistics,
            "versions": {name: installed_version(name) for name in ("oretrofit", "tabpfn", "torch")},
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    def save_fit(self, regressor: TabPFNRegressor, path: str | Path) -> None:
        """Save a regressor fitted on this retrofit's specs, without weights, to a `.tabpfn_fit` file.

        TabPFN's own `save_fit_state` cannot write an estimator that was built from specs.
        Raises `ValueError` if the regressor is not fitted or fitted on other specs, has a parameter
        that is no JSON, or the suffix is another.
        """
        path = Path(path)
        if path.suffix != _FIT_SUFFIX:
            raise ValueError(f"the file must end in {_FIT_SUFFIX}, not {path.name!r}")
        if not hasattr(regressor, "executor_"):
            raise ValueError("the regressor is not fitted, or was fitted on a constant target, which needs no model")
        fitted = regressor.models_[0]
        # An engine may have cast the weights it was given: compare them in the precision it left.
        weights = copy.deepcopy(self.host.model).to(next(fitted.parameters()).dtype)
        same_taus = model_taus(fitted) == {site.name: site.tau for site in self.sites}
        if not same_taus or weights_sha256(fitted) != weights_sha256(weights):
            raise ValueError("the regressor was not fitted on the specs of this retrofit")
        named = copy.copy(regressor)
        named.model_path = "oretrofit"  # specs are no JSON; `load_fit` puts this retrofit's in
        try:
            named.save_fit_state(path)
        except TypeError as error:
            raise ValueError(f"TabPFN's file format cannot hold a parameter of this regressor: {error}") from error
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("oretrofit.json", json.dumps(self._identity()))

    def load_fit(self, path: str | Path, *, device: str = "auto") -> TabPFNRegressor:
        """Load a regressor saved by `save_fit` of this retrofit (same weights, variant and taus).

        The file holds pickled preprocessors, as TabPFN's own do: load only what you trust.
        Raises `RetrofitError` if it was saved by another retrofit, or is no such file.
        """
        with tempfile.TemporaryDirectory() as folder:
            try:
                with zipfile.ZipFile(path) as archive:
                    saved_by = json.loads(archive.read("oretrofit.json"))
                    for member in _FIT_MEMBERS:
                        archive.extract(member, folder)
            except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
                raise RetrofitError(f"{path} was not saved by Retrofit.save_fit: {error}") from error
            if saved_by != self._identity():
                raise RetrofitError(f"{path} was saved by a retrofit with other weights, variant or taus")
            files = Path(folder)
            params = json.loads((files / "init_params.json").read_text())
            params.pop("__class_name__")
            precision = str(params["inference_precision"])
            if precision.startswith("torch."):
                params["inference_precision"] = getattr(torch, precision.removeprefix("torch."))
            regressor = TabPFNRegressor(**{**params, "model_path": self.specs, "device": device})
            tabpfn_api.initialize(regressor)
            for name, value in joblib.load(files / "fitted_attrs.joblib").items():
                setattr(regressor, name, value)
            regressor.executor_ = tabpfn_api.load_engine(files / "executor_state.joblib", regressor.models_)
        regressor.to(device)
        return regressor

    predict_ragged = predict_ragged
    predict_groups = predict_groups

    def _identity(self) -> dict[str, Any]:
        taus = {site.name: site.tau for site in self.sites}
        return {"sha256": self.host.sha256, "variant": self.variant, "tau": taus}


def patch(
    host: HostLike = settings.HOST,
    variant: str = settings.VARIANT,
    *,
    delta: float = settings.DELTA,
    quantile: float = settings.QUANTILE,
    tau: float | None = None,
    calibration: Calibration | None = None,
    tables: int = settings.TABLES,
    seed: int = settings.SEED,
    device: str = "cpu",
    on_table: Callable[[], None] | None = None,
) -> Retrofit:
    """Clone a host, calibrate tau per carrier, and patch the clone. No weight is trained.

    Calibration fits and predicts synthetic tables with the host through TabPFN's own
    preprocessing, and sets each carrier's tau so that all but the `quantile` smallest of its tokens
    keep presence of at least `1 - delta`.

    Args:
        host: A host's name or path, a `TabPFNRegressor`, or a v3 model; see `load_host`.
        variant: `oa` (OAttention everywhere), `full-o` (and OFFN and ONorm) or `closed` (and the
            count of keys, the scaler and the doors: O-closed from input to readout).
        delta: 1 minus the presence at the quantile, in (0, 1).
        quantile: Which low quantile of the live carriers' `||h||^2`, in [0, 1].
        tau: One value for every site instead of calibrating, in the unit of `||h||^2`.
        calibration: What `calibrate` returned for this host, to patch it several times on one
            measurement; `tables`, `seed` and `device` are its own then.
        tables: Synthetic tables to calibrate on.
        seed: Seed of those tables.
        device: Where the calibration runs.
        on_table: Called after each calibration table, to show progress.

    Raises:
        HostError: The host cannot be found, read, or is no v3 regressor.
        PatchError: The model has parts that are not known, or that would pass the patch by.
        TabPFNDriftError: A TabPFN other than the one that the patches were written for.
        ValueError: An unknown variant, a number out of range, or the calibration of another host.
    """
    check_variant(variant)
    settings.check_delta(delta, quantile)
    if tau is not None:
        check_tau(tau)
    host = load_host(host)
    names = carriers(host.model, variant)
    if tau is not None:
        return _assemble(host, variant, dict.fromkeys(names, tau), {"tau": tau})
    if calibration is None:
        calibration = calibrate(host, variant, tables=tables, seed=seed, device=device, on_table=on_table)
    elif calibration.host_sha256 != host.sha256:
        raise ValueError("the calibration was measured on a host with other weights; see oretrofit.calibrate")
    taus = calibration.taus(variant, delta, quantile)
    return _assemble(host, variant, taus, calibration.provenance(delta, quantile), calibration.statistics(taus))


def calibrate(
    host: HostLike = settings.HOST,
    variant: str = "closed",
    *,
    tables: int = settings.TABLES,
    seed: int = settings.SEED,
    device: str = "cpu",
    on_table: Callable[[], None] | None = None,
) -> Calibration:
    """Measure `||h||^2` of a host's carriers on synthetic tables, once for many patches; arguments as of `patch`.

    What is measured for `closed` serves the other variants too.
    """
    host = load_host(host)
    found = carriers(host.model, variant)
    return Calibration.measure(
        host.specs, host.sha256, found, tables=tables, seed=seed, device=device, on_table=on_table
    )


def load(path: str | Path, host: HostLike | None = None) -> Retrofit:
    """Load a retrofit saved by `Retrofit.save`.

    Args:
        path: The JSON file.
        host: The host it was made for, by default the one that the file names.

    Raises:
        RetrofitError: Not a retrofit file, or made for other weights than the host's.
        HostError: The host cannot be loaded, or the file names none and none was given.
    """
    try:
        content = json.loads(Path(path).read_text())
        found, variant = content["format"], content["variant"]
        name, sha256 = content["host"]["name"], str(content["host"]["sha256"])
        taus = {str(site): float(tau) for site, tau in content["tau"].items()}
        provenance, statistics = dict(content["calibration"]), dict(content["statistics"])
        check_variant(variant)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetrofitError(f"{path} is not a retrofit written by oretrofit: {error!r}") from error
    if found != _FORMAT:
        raise RetrofitError(f"{path} has format {found!r}; this version reads {_FORMAT!r}")
    if host is None and name is None:
        raise HostError(f"{path} was made for a model given as an object; say which one: load(FILE, host=...)")
    loaded = load_host(name if host is None else host)
    if loaded.sha256 != sha256:
        raise RetrofitError(
            f"{path} was made for other weights: host {name or '(an object)'} with SHA-256 {sha256[:12]}..., "
            f"not {loaded.name or 'the given host'} with {loaded.sha256[:12]}..."
        )
    try:
        return _assemble(loaded, variant, taus, provenance, statistics)
    except ValueError as error:
        raise RetrofitError(f"{path} does not fit its host: {error}") from error


def _assemble(
    host: Host,
    variant: str,
    taus: dict[str, float],
    provenance: dict[str, Any],
    statistics: dict[str, dict[str, float]] | None = None,
) -> Retrofit:
    model = copy.deepcopy(host.model)
    sites = patch_model(model, variant, taus)
    return Retrofit(host, variant, model, sites, provenance, statistics or {})
