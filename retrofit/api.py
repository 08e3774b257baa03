"""`patch`, `load` and the `Retrofit` they return."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from threading import Lock
from typing import Any

import pandas as pd
import torch
from tabpfn.base import ModelSpecs
from torch import nn

from ..calibration import settings
from ..calibration.calibration import Calibration
from ..calibration.variants import check_variant
from .checkpoints import SUFFIX, read_retrofit, write_retrofit
from .files import write_text
from .hosts import Host, HostError, HostLike, lend, load_host
from .patcher import Site, carriers, check_tau, known_spec, patch_model
from .ragged.groups import predict_groups
from .ragged.predicting import predict_ragged
from .sites import as_html, as_text
from .tabpfn_api import check_tabpfn

_FORMAT = "oretrofit-1"


class RetrofitError(ValueError):
    """A retrofit file that cannot be used: not one, of another version, or made for other weights."""


@dataclass(repr=False)
class Retrofit:
    """A patched clone of a host, and how it was made.

    Attributes:
        host: The host; its model is never touched.
        variant: `oa`, `full-o` or `closed`.
        sites: Every patched carrier with its tau.
        settings: What tau was chosen with.
        statistics: Per site, quantiles of `||h||^2` and presence on the calibration tables; empty
            where tau was given.
    """

    host: Host
    variant: str
    _model: nn.Module
    sites: list[Site]
    settings: dict[str, Any]
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)
    _is_lent: bool = True
    _lock: Lock = field(default_factory=Lock, compare=False)

    @property
    def model(self) -> nn.Module:
        """The patched clone, always the same. Give estimators `specs`, not this.

        Its weights are the host's own, in memory, until it is first asked for: then it gets a copy, to be written to.
        """
        with self._lock, torch.inference_mode(False):
            if self._is_lent:
                self._model, self._is_lent = copy.deepcopy(self._model), False
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: without the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With a lock of its own."""
        vars(self).update(state, _lock=Lock())

    @property
    def specs(self) -> ModelSpecs:
        """A fresh copy of the patched model for `TabPFNRegressor(model_path=...)`.

        A copy each time: TabPFN's engines cast the model they run to another precision in place.
        """
        return self.host.specs_with(self._model)

    @property
    def lent_specs(self) -> ModelSpecs:
        """The same without a copy of the weights, for who does not write to them (`hosts.lend`)."""
        return self.host.specs_with(self._model, lent=True)

    @property
    def host_specs(self) -> ModelSpecs:
        """As `specs`, of the unpatched host."""
        return self.host.specs

    @property
    def table(self) -> pd.DataFrame:
        """One row a site: name, carrier, classes, tau and, where calibrated, the statistics."""
        return pd.DataFrame([asdict(site) | self.statistics.get(site.name, {}) for site in self.sites])

    def __repr__(self) -> str:
        """In a line: the host's name, the variant, what tau was chosen with, and how many sites there are."""
        chosen = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        host = self.host.name or f"a {type(self.host.model).__name__}"
        return f"<Retrofit of {host}: variant={self.variant!r}{chosen}, {len(self.sites)} sites>"

    def __str__(self) -> str:
        """That and every site, in tables as wide as the terminal is."""
        return as_text(repr(self), self.table, known_spec(self._model))

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        return as_html(repr(self), self.table)

    def to_dict(self) -> dict[str, Any]:
        """What makes the retrofit beside the host's weights, in JSON's types: what `save` writes."""
        return {
            "format": _FORMAT,
            "host": {"name": self.host.name, "sha256": self.host.sha256},
            "variant": self.variant,
            "tau": {site.name: site.tau for site in self.sites},
            "calibration": self.settings,
            "statistics": self.statistics,
            "versions": {name: installed_version(name) for name in ("oretrofit", "tabpfn", "torch")},
        }

    def save(self, path: str | Path) -> None:
        """Write the retrofit as JSON: the host's identity, variant, taus, settings; no weights.

        `load` reads it. It is written whole or not at all; raises `OSError` where it cannot be.
        """
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    def save_checkpoint(self, path: str | Path) -> None:
        """Write host and retrofit as a checkpoint that `TabPFNRegressor(model_path=path)` loads, and `load` as well.

        A regressor that is built from the path, and not from `specs`, is patched all the same, and everything of
        TabPFN's that goes by a path works on it: `save_fit_state` and `load_from_fit_state`, and `clone` and pickles
        of the unfitted regressor without weights.

        ```python
        from oretrofit import patch
        from sklearn.datasets import load_diabetes
        from tabpfn import TabPFNRegressor

        X, y = load_diabetes(return_X_y=True)
        patch("small", variant="closed").save_checkpoint("mine-v3.safetensors")
        regressor = TabPFNRegressor(model_path="mine-v3.safetensors").fit(X[:40], y[:40])
        regressor.save_fit_state("mine.tabpfn_fit")
        regressor = TabPFNRegressor.load_from_fit_state("mine.tabpfn_fit")
        ```

        TabPFN has to know the architecture of such a file, which importing anything from oretrofit tells it
        (`from oretrofit import load`). In a process that did not, it raises `KeyError: 'oretrofit_tabpfn_v3'`.

        Args:
            path: Ends in `.safetensors`, and has the version in its name that TabPFN is to take it for, `v3`.

        Raises:
            ValueError: Another name, or a model that was trained since: a retrofit is about its host's weights.
            OSError: The file cannot be written.
        """
        if not self._is_lent:
            own = nn.Module.state_dict(self._model)
            if not all(torch.equal(own[name], weight) for name, weight in self.host.model.state_dict().items()):
                raise ValueError(
                    "the retrofit's model has other weights than its host by now, which no retrofit's checkpoint can "
                    "hold; train the host, and patch that"
                )
        write_retrofit(self.host, self.to_dict(), Path(path))

    predict_ragged = predict_ragged
    predict_groups = predict_groups


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
    check_tabpfn()
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
    check_tabpfn()
    host = load_host(host)
    found = carriers(host.model, variant)
    return Calibration.measure(
        host.specs, host.sha256, found, tables=tables, seed=seed, device=device, on_table=on_table
    )


def load(path: str | Path, host: HostLike | None = None) -> Retrofit:
    """Load a retrofit saved by `Retrofit.save` or `Retrofit.save_checkpoint`.

    Args:
        path: The JSON file, or the `.safetensors` checkpoint.
        host: The host it was made for. By default the one that the JSON file names, or that is in the checkpoint.

    Raises:
        RetrofitError: Not a retrofit file, or made for other weights than the host's.
        HostError: The host cannot be loaded, or the file names none and none was given.
    """
    path, found = Path(path), None
    try:
        if path.suffix == SUFFIX:
            content, found = read_retrofit(path)
        else:
            content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        # Of UnicodeDecodeError the words hold the whole file.
        reason = "no text" if isinstance(error, UnicodeDecodeError) else repr(error)
        raise RetrofitError(f"{path} is not a retrofit written by oretrofit: {reason}") from error
    return retrofit_from_dict(content, found if host is None else host, str(path))


def retrofit_from_dict(content: dict[str, Any], host: HostLike | None, where: str) -> Retrofit:
    """The retrofit that `Retrofit.to_dict` describes, on a host, by default the one that it names.

    Raises as of `load`, with `where` for the name of the content.
    """
    try:
        found, variant = content["format"], content["variant"]
        name, sha256 = content["host"]["name"], str(content["host"]["sha256"])
        taus = {str(site): float(tau) for site, tau in content["tau"].items()}
        provenance, statistics = dict(content["calibration"]), dict(content["statistics"])
        check_variant(variant)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetrofitError(f"{where} is not a retrofit written by oretrofit: {error!r}") from error
    if found != _FORMAT:
        raise RetrofitError(f"{where} has format {found!r}; this version reads {_FORMAT!r}")
    if host is None and name is None:
        raise HostError(f"{where} was made for a model given as an object; say which one: load(FILE, host=...)")
    loaded = load_host(name if host is None else host)
    if loaded.sha256 != sha256:
        raise RetrofitError(
            f"{where} was made for other weights: host {name or '(an object)'} with SHA-256 {sha256[:12]}..., "
            f"not {loaded.name or 'the given host'} with {loaded.sha256[:12]}..."
        )
    try:
        return _assemble(loaded, variant, taus, provenance, statistics)
    except ValueError as error:
        raise RetrofitError(f"{where} does not fit its host: {error}") from error


def _assemble(
    host: Host,
    variant: str,
    taus: dict[str, float],
    provenance: dict[str, Any],
    statistics: dict[str, dict[str, float]] | None = None,
) -> Retrofit:
    model = lend(host.model)
    sites = patch_model(model, variant, taus)
    return Retrofit(host, variant, model, sites, provenance, statistics or {})
