"""A scikit-learn regressor on a retrofit, which carries names instead of weights."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d, validate_data
from tabpfn import TabPFNRegressor
from torch import nn

from ..calibration import settings
from ..calibration.calibration import Calibration
from ..calibration.variants import check_variant
from . import tabpfn_api
from .api import Retrofit, calibrate, load, patch, retrofit_from_dict
from .checkpoints import SUFFIX
from .hosts import Host, load_host
from .patcher import check_tau
from .ragged.groups import check_groups

# ---- What a process keeps, so that clones need not calibrate anew -------------------------------

# Of each kind the last two: a host of Prior Labs' size takes 230 MB, a retrofit of it as much again.
_KEPT = 2
_LOCK = threading.RLock()


@dataclass(frozen=True)
class _Source:
    """Where a host comes from: a name, a path, an object, or the checkpoint of a retrofit that holds it.

    Attributes:
        identity: What tells hosts apart; of a file its time and size, too.
        place: The name, the path, or the host itself.
        in_retrofit: Whether it is the checkpoint of a retrofit.
    """

    identity: Hashable
    place: str | Host = field(compare=False)
    in_retrofit: bool = False

    @classmethod
    def of(cls, host: Any, in_retrofit: bool = False) -> _Source:
        if isinstance(host, (str, Path)):
            return cls(_file_identity(host) or str(host), str(host), in_retrofit)
        if not isinstance(host, (Host, nn.Module)):
            # A fitted TabPFNRegressor would lose its model in each clone.
            raise TypeError(
                f"host is a name, a path, a model, or what oretrofit.load_host returns, not a {type(host).__name__}"
            )
        loaded = load_host(host)
        return cls((loaded.sha256, repr(loaded.inference_config)), loaded)


def _file_identity(path: str | Path) -> Hashable:
    """What tells a file from others and from what it was before; None for no file."""
    place = Path(path).expanduser()
    if str(path) in settings.HOST_NAMES or not place.is_file():
        return None
    stat = place.stat()
    return str(place.resolve()), stat.st_mtime_ns, stat.st_size


@functools.lru_cache(_KEPT)
def _host(source: _Source) -> Host:
    return load(source.place).host if source.in_retrofit else load_host(source.place)  # type: ignore[arg-type]


@functools.lru_cache(_KEPT)
def _calibration(source: _Source) -> Calibration:
    return calibrate(_host(source))


@functools.lru_cache(_KEPT)
def _patched(source: _Source, variant: str, delta: float, quantile: float, tau: float | None) -> Retrofit:
    calibration = None if tau is not None else _calibration(source)
    return patch(_host(source), variant, delta=delta, quantile=quantile, tau=tau, calibration=calibration)


@functools.lru_cache(_KEPT)
def _saved(identity: Hashable, path: str, source: _Source | None) -> Retrofit:
    return load(path, None if source is None else _host(source))


@functools.lru_cache(_KEPT)
def _described(source: _Source, content: str) -> Retrofit:
    return retrofit_from_dict(json.loads(content), _host(source), "the fitted RetrofitRegressor")


# ---- The estimator ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """What a fit was given, from which it can be done again: no weights, unless the host is an object.

    Attributes:
        X: The rows; with a group column, the frame that holds the target as well.
        y: Their targets; with a group column, the name of the target in X.
        options: Of the `TabPFNRegressor`, the seed that was drawn included.
        by: The group column, or None.
        host: As of `_Source`.
        in_retrofit: As of `_Source`.
        retrofit: `Retrofit.to_dict` as JSON.
    """

    X: Any
    y: Any
    options: dict[str, Any]
    by: str | None
    host: str | Host
    in_retrofit: bool
    retrofit: str


class RetrofitRegressor(RegressorMixin, BaseEstimator):
    """TabPFN on a retrofitted host, as scikit-learn expects a regressor.

    Its parameters are plain, so that clones, grid searches and pickles, those of a fitted one included, carry the
    host's name and not its weights. A pickle holds what `fit` was given, and fits once more where it is used, to the
    same predictions. tau is calibrated once a process for each host, however many clones are fitted; to share it
    between processes, save a retrofit and pass its path as `retrofit`.

    ```python
    from oretrofit import RetrofitRegressor
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import GridSearchCV

    X, y = load_diabetes(return_X_y=True, as_frame=True)
    regressor = RetrofitRegressor().fit(X[:200], y[:200])
    low, median, high = regressor.predict(X[200:220], output_type="quantiles", quantiles=[0.1, 0.5, 0.9])

    grid = {"variant": ["oa", "closed"], "estimator__n_estimators": [1, 2]}
    search = GridSearchCV(RetrofitRegressor(), grid, cv=2).fit(X[:60], y[:60])

    by_sex = RetrofitRegressor(by="sex").fit(X[:200], y[:200])
    means = by_sex.predict(X[200:220])  # each row from the rows of its own group
    ```

    Args:
        host: As of `oretrofit.patch`: a name, a path, a model, or what `load_host` returns. The last two are copied
            into each clone and pickle; of a `TabPFNRegressor` take `load_host(regressor)`.
        variant: `oa`, `full-o` or `closed`. By default `closed`, unlike `patch`: `by` needs it, and it is as near to
            its host as the others.
        delta: As of `oretrofit.patch`.
        quantile: As of `oretrofit.patch`.
        tau: As of `oretrofit.patch`.
        retrofit: Path of a retrofit saved by `Retrofit.save` or `Retrofit.save_checkpoint`, in place of `variant`,
            `delta`, `quantile` and `tau`, and of `host` unless its file names none.
        by: The column of `X` that names the group (a store, a series, a patient): `fit` keeps the long table, and
            `predict` answers each group from its own rows; see `Retrofit.predict_groups`. None for one table.
        too_few: With `by`, what becomes of groups with fewer than two train rows: `error`, `nan` or `pooled`.
        estimator: The `TabPFNRegressor` whose options are used, all but `model_path`; its defaults for None. They are
            parameters of this one, too: `estimator__n_estimators`, `estimator__device`.

    Attributes:
        n_features_in_: Columns of `X`, the group's included.
        feature_names_in_: Their names, where all are strings.
        retrofit_: The `Retrofit`; `retrofit_.table` lists its sites.
        estimator_: The fitted `TabPFNRegressor`; None with `by`.
    """

    retrofit_: Retrofit
    estimator_: Any

    # What holds weights, and is left out of pickles and copies.
    _MODELS: ClassVar[tuple[str, ...]] = ("retrofit_", "estimator_")

    # Notebooks show it as one block: scikit-learn takes what is within a fitted estimator for fitted as well, and an
    # inner TabPFNRegressor that is not raises when its attributes are listed.
    _sk_visual_block_ = None

    def __init__(
        self,
        host: str | Path | nn.Module | Host = settings.HOST,
        *,
        variant: str = "closed",
        delta: float = settings.DELTA,
        quantile: float = settings.QUANTILE,
        tau: float | None = None,
        retrofit: str | Path | None = None,
        by: str | None = None,
        too_few: str = "error",
        estimator: TabPFNRegressor | None = None,
    ) -> None:
        self.host = host
        self.variant = variant
        self.delta = delta
        self.quantile = quantile
        self.tau = tau
        self.retrofit = retrofit
        self.by = by
        self.too_few = too_few
        self.estimator = estimator

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters and, if `deep`, the inner estimator's; its defaults where there is none."""
        params = super().get_params(deep)
        if deep and self.estimator is None:
            params |= {f"estimator__{name}": value for name, value in TabPFNRegressor().get_params().items()}
        return params

    def set_params(self, **params: Any) -> RetrofitRegressor:
        """Set parameters; one of the inner estimator makes one, where there is none."""
        if params.get("estimator", self.estimator) is None and any(name.startswith("estimator__") for name in params):
            params = {**params, "estimator": TabPFNRegressor()}
        return super().set_params(**params)

    def fit(self, X: Any, y: Any) -> RetrofitRegressor:
        """Fit a table, or keep the long table of groups.

        Args:
            X: (n, columns), as `TabPFNRegressor` takes it; with `by` a DataFrame with that column.
            y: The targets (n,), in the order of the rows.

        Raises:
            ValueError: A parameter out of range or at odds with another, or a table that cannot be fitted.
            TypeError: A host or an estimator of another kind.
            HostError: The host cannot be loaded.
            RetrofitError: The saved retrofit cannot.
        """
        options = self._options()
        with _LOCK:
            retrofit, host, in_retrofit = self._make_retrofit()
        estimator = None
        if self.by is None:
            estimator = TabPFNRegressor(**options, model_path=retrofit.specs).fit(X, y)
            kept = copy.deepcopy((X, y))
        else:
            if retrofit.variant != "closed":
                raise ValueError(f"by={self.by!r} needs the variant 'closed', not {retrofit.variant!r}")
            kept = self._long_table(X, y)
        validate_data(self, X, skip_check_array=True)
        self._given = _Given(*kept, options, self.by, host, in_retrofit, json.dumps(retrofit.to_dict()))
        self.retrofit_, self.estimator_ = retrofit, estimator
        return self

    def predict(self, X: Any, *, output_type: str = "mean", quantiles: list[float] | None = None) -> Any:
        """Predict rows.

        Args:
            X: (n, columns), as `fit` was given.
            output_type: As of `TabPFNRegressor.predict`; with `by`, `full` is not among them.
            quantiles: As of `TabPFNRegressor.predict`.

        Returns:
            For `mean`, `median` and `mode` an array (n,). For others what `TabPFNRegressor.predict` returns; with
            `by`, a DataFrame with the index of `X` and a column for each, as of `Retrofit.predict_groups`.

        Raises:
            NotFittedError: Before `fit`.
            ValueError: Rows that do not fit those of `fit`; with `by`, as of `Retrofit.predict_groups`.
            HostError, RetrofitError: A pickle's host is not there, or has other weights than at `fit`.
        """
        check_is_fitted(self)
        given = self._given
        if getattr(X, "ndim", 2) == 2:  # of others TabPFN says better what is wrong
            validate_data(self, X, reset=False, skip_check_array=True)
        if given.by is None:
            return self.estimator_.predict(X, output_type=output_type, quantiles=quantiles)
        answer = self.retrofit_.predict_groups(
            given.X,
            X,
            target=given.y,
            by=given.by,
            output_type=output_type,
            quantiles=quantiles,
            too_few=self.too_few,
            **self._options_of_groups(),
        )
        return answer.to_numpy() if isinstance(answer, pd.Series) else answer

    def __getattr__(self, name: str) -> Any:
        """`retrofit_` and `estimator_` after unpickling: made once more of what `fit` was given."""
        if name not in self._MODELS or "_given" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        given = self._given
        with _LOCK:
            retrofit = _described(_Source.of(given.host, given.in_retrofit), given.retrofit)
        estimator = None
        if given.by is None:
            estimator = TabPFNRegressor(**given.options, model_path=retrofit.specs).fit(given.X, given.y)
        self.retrofit_, self.estimator_ = retrofit, estimator
        return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies hold: parameters, names, and what `fit` was given."""
        return {name: value for name, value in super().__getstate__().items() if name not in self._MODELS}

    def __sklearn_is_fitted__(self) -> bool:
        """Whether `fit` succeeded."""
        return hasattr(self, "_given")

    def __sklearn_tags__(self) -> Any:
        """As of `TabPFNRegressor`: missing cells are allowed."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # ---- Parameters -----------------------------------------------------------------------------

    def _make_retrofit(self) -> tuple[Retrofit, str | Host, bool]:
        """The retrofit that the parameters ask for, where its host can be had again, and whether that is a retrofit."""
        if self.retrofit is None:
            check_variant(self.variant)
            settings.check_delta(self.delta, self.quantile)
            if self.tau is not None:
                check_tau(self.tau)
            retrofit = _patched(_Source.of(self.host), self.variant, self.delta, self.quantile, self.tau)
            return retrofit, retrofit.host.name or retrofit.host, False
        if not isinstance(self.retrofit, (str, Path)):
            raise TypeError(f"retrofit is the path of a saved one, not a {type(self.retrofit).__name__}")
        defaults = inspect.signature(type(self)).parameters
        for name in ("variant", "delta", "quantile", "tau"):
            if getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} is the saved retrofit's own: give either {name} or retrofit")
        path = Path(self.retrofit).expanduser()
        host = None if self.host == settings.HOST else _Source.of(self.host)
        retrofit = _saved(_file_identity(path), str(path), host)
        if host is None and path.suffix == SUFFIX:
            return retrofit, str(path.resolve()), True
        return retrofit, retrofit.host.name or retrofit.host, False

    def _options(self) -> dict[str, Any]:
        """The inner estimator's options but its model, with a seed in place of a generator."""
        inner = TabPFNRegressor() if self.estimator is None else self.estimator
        if not isinstance(inner, TabPFNRegressor):
            raise TypeError(f"estimator is a TabPFNRegressor or None, not a {type(inner).__name__}")
        options = clone(inner).get_params(deep=False)
        if options.pop("model_path") != "auto":
            raise ValueError("the inner estimator's model_path is the retrofit's; name the model as host or retrofit")
        del options["n_jobs"]  # deprecated, without effect, and warned of even so
        # Drawn from the user's own generator, which moves on as scikit-learn has it.
        options["random_state"], _ = tabpfn_api.infer_random_state(inner.random_state)
        return options

    def _options_of_groups(self) -> dict[str, Any]:
        """The same for groups, whose tables have no group column."""
        given = self._given
        options = dict(given.options)
        if options["categorical_features_indices"] is not None:
            at = list(given.X.columns).index(given.by)
            indices = [int(index) for index in options["categorical_features_indices"]]
            options["categorical_features_indices"] = [i - (i > at) for i in indices if i != at]
        return options

    def _long_table(self, X: Any, y: Any) -> tuple[pd.DataFrame, str]:
        """X with the target in a column of its own, and that column's name."""
        if not isinstance(X, pd.DataFrame):
            raise ValueError(f"with by={self.by!r}, X is a DataFrame with that column, not a {type(X).__name__}")
        y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype="numeric", input_name="y")
        check_consistent_length(X, y)
        target = "target"
        while target in X.columns:
            target += "_"
        table = X.assign(**{target: y})
        check_groups(table, table, target=target, by=self.by)  # type: ignore[arg-type]
        return table, target
