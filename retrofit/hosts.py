"""Finding and loading hosts: pretrained TabPFN v3 regressors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures import tabpfn_v3
from tabpfn.base import ModelSpecs
from torch import nn

from ..calibration.settings import HOST_NAMES, HOSTS
from ..patches.architectures import HOST_SPECS, spec_named, spec_of
from ..patches.host_spec import HostSpec
from . import tabpfn_api
from .patcher import unpatch

HOSTS_FOLDER = Path(__file__).parent / "hosts"
SMALL_HOST = HOSTS_FOLDER / "oretrofit-small-v3-regressor.safetensors"

# How the architecture of a retrofit's checkpoint is called: this, and the host's (see `checkpoints.py`).
RETROFIT_PREFIX = "oretrofit_"

HostLike: TypeAlias = "str | Path | TabPFNRegressor | nn.Module | Host"

_HOW_TO_GET_V3 = (
    "Prior Labs' v3 regressor is the host `v3`; it needs their licence (TABPFN_TOKEN) or its checkpoint "
    "tabpfn-v3-regressor-v3_default.ckpt. The bundled host `small` needs nothing."
)


class HostError(ValueError):
    """A host that cannot be found, read, or patched; the message says what to do."""


@dataclass
class Host:
    """A regressor to be patched.

    Attributes:
        name: What it was loaded by (a name or an absolute path), or None for one given as an object.
        model: The network. Never modified: `specs` hands out copies, and the patcher what `lend` makes of it.
        inference_config: TabPFN's preprocessing settings that belong to the weights.
        norm_criterion: The bar distribution, where the checkpoint stores one beside the model.
    """

    name: str | None
    model: nn.Module
    inference_config: tabpfn_api.InferenceConfig
    norm_criterion: tabpfn_api.FullSupportBarDistribution | None = None

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 over the weights: names, dtypes, shapes and bytes, whatever file they came from."""
        return weights_sha256(self.model)

    @property
    def specs(self) -> ModelSpecs:
        """A fresh copy of the host for `TabPFNRegressor(model_path=...)`.

        A copy each time: TabPFN's engines cast and move the model that they are given in place.
        """
        return self.specs_with(self.model)

    def specs_with(self, model: nn.Module, *, lent: bool = False) -> ModelSpecs:
        """The same with a copy of `model`, a patched clone of the host's, or with what `lend` makes of it."""
        return ModelSpecs(
            model=lend(model) if lent else copy.deepcopy(model),  # type: ignore[arg-type]
            architecture_config=self.model.config,  # type: ignore[arg-type]
            inference_config=copy.deepcopy(self.inference_config),
            norm_criterion=copy.deepcopy(self.norm_criterion),
        )


def lend(model: nn.Module) -> nn.Module:
    """A copy of a model that has the model's own weights: they take up no memory of their own.

    It may be patched, moved and cast, which puts other weights in place of its own. What writes into weights (an
    optimizer does) would write into the model's, too.
    """
    memo: dict[int, Any] = {}
    for weight in [*model.parameters(), *model.buffers()]:
        same = weight.detach()
        memo[id(weight)] = nn.Parameter(same, weight.requires_grad) if isinstance(weight, nn.Parameter) else same
    return copy.deepcopy(model, memo)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over a model's weights in the order of their names."""
    digest = hashlib.sha256()
    for name, value in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_host(host: HostLike = "small") -> Host:
    """Load a host.

    Args:
        host: `small`, `random-v3` or `v3` (see `calibration.settings.HOST_NAMES`); the path of a v3 regressor
            checkpoint (`.ckpt`, read without unpickling code, or `.safetensors`); a
            `TabPFNRegressor`, fitted or not, whose model is a v3 regressor; or a `TabPFNV3`.

    Raises:
        HostError: Nothing by that name or path, an unreadable file, another architecture, a
            classifier, or weights that could not be obtained.
    """
    if isinstance(host, Host):
        return host
    if isinstance(host, TabPFNRegressor):
        return _from_regressor(host)
    if not isinstance(host, (str, Path, nn.Module)):
        raise HostError(
            f"a host is a name, a path, a TabPFNRegressor or a v3 regressor model, not a {type(host).__name__}"
        )
    if isinstance(host, nn.Module):
        _spec_of_regressor(host, "the given model")
        return Host(None, _unpatched_clone(host), _with_cpu_limit(tabpfn_api.default_inference_config()))
    if host == "small":
        return _from_checkpoint(SMALL_HOST, "small")
    if host == "random-v3":
        return random_host()
    if host == "v3":
        return _from_prior_labs()
    path = Path(host).expanduser()
    if not path.exists():
        raise HostError(
            f"no host {str(host)!r}: neither a known name ({', '.join(HOST_NAMES)}) nor an existing checkpoint file"
        )
    return _from_checkpoint(path, str(path.resolve()))


def find_hosts() -> list[dict[str, Any]]:
    """What `load_host` takes by name, and whether it is here. Nothing is loaded, and nothing downloaded.

    Returns:
        For each `host`: `available`, True or False; `what` it is; `where` its weights come from, in words, with `~`
        for the home folder.
    """
    v3 = tabpfn_api.prior_labs_path("v3")
    token = tabpfn_api.has_token()
    folder = shortened(v3.parent)
    where = f"{v3.name} in TabPFN's cache folder {folder}"
    if not v3.is_file():
        how = "is downloaded there when first used" if token else "belongs there, or a licence (TABPFN_TOKEN) gets it"
        where = f"not in TabPFN's cache folder {folder}; {v3.name} {how}"
    found = {
        "small": (SMALL_HOST.is_file(), "bundled"),
        "random-v3": (True, "drawn when it is asked for"),
        "v3": (v3.is_file() or token, where),
    }
    return [
        {"host": name, "available": available, "what": HOSTS[name], "where": where}
        for name, (available, where) in found.items()
    ]


def shortened(path: Path) -> str:
    """A path with the home folder as `~`, so that it may be shown to others."""
    return f"~/{path.relative_to(Path.home()).as_posix()}" if path.is_relative_to(Path.home()) else str(path)


def random_host(seed: int = 0, **config: Any) -> Host:
    """A v3 regressor with seeded random weights, the same on every machine, full size unless `config` says otherwise.

    TabPFN initialises every output projection to zero, so that a fresh model predicts the same for
    every row; here they are drawn too, and the readout is made to give a normal distribution
    whose mean depends on the row.
    """
    standard = seed == 0 and not config
    with torch.random.fork_rng(devices=[]):  # which building a model draws from
        model: Any = tabpfn_v3.get_architecture(tabpfn_v3.TabPFNV3Config(**{"num_buckets": 5000, **config}))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, nn.Linear):
                    _draw(parameter, rng, 1 / math.sqrt(module.in_features))
                elif parameter.ndim > 1:
                    _draw(parameter, rng, 0.02)
        # logits = a(row) * c - c^2 / 2 over bucket centres c: N(a, 1) up to a constant.
        borders = model.regression_borders.double().clamp(-6, 6)
        centers = (borders[1:] + borders[:-1]) / 2
        last = model.output_projection[-1]
        direction = torch.zeros(last.in_features, dtype=torch.float64)
        _draw(direction, rng, 1 / math.sqrt(last.in_features))
        last.weight.copy_(2 * centers[:, None] * direction + 0.1 * last.weight)
        last.bias.copy_(model.regression_borders.double().diff().log() - centers.square() / 2)
    return Host("random-v3" if standard else None, model.eval(), _with_cpu_limit(tabpfn_api.default_inference_config()))


def _draw(parameter: torch.Tensor, rng: np.random.Generator, deviation: float) -> None:
    # Not by torch, whose random numbers depend on its release and on how wide the processor's vectors are.
    drawn = (2 * rng.random(tuple(parameter.shape)) - 1) * (math.sqrt(3) * deviation)
    parameter.copy_(torch.from_numpy(drawn))


def _with_cpu_limit(config: tabpfn_api.InferenceConfig) -> tabpfn_api.InferenceConfig:
    # TabPFN sets this for models it loads from a path; through ModelSpecs the config's own
    # default of 1,000 rows would stand.
    limit = tabpfn_api.cpu_sample_limit(tabpfn_api.ModelVersion.V3)
    return dataclasses.replace(config, MAX_CPU_SAMPLES=limit)


def _from_checkpoint(path: Path, name: str) -> Host:
    checkpoint = read_checkpoint(path)
    if str(checkpoint.get("architecture_name")).startswith(RETROFIT_PREFIX):
        raise HostError(f"{path} is a retrofit, which holds its host; load it by oretrofit.load, not as a host")
    return host_in_checkpoint(checkpoint, path, name)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A TabPFN checkpoint, as it is in the file. Raises `HostError` for a file that is none."""
    try:
        if path.suffix == ".safetensors":
            checkpoint = tabpfn_api.Checkpoint(path).load()
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise HostError(f"cannot read the checkpoint {path}: {error}") from error
    if not isinstance(checkpoint, dict) or not all(
        isinstance(checkpoint.get(key), dict) for key in ("state_dict", "config")
    ):
        raise HostError(f"{path} is not a TabPFN checkpoint: it has no `state_dict` and `config`")
    return checkpoint


def host_in_checkpoint(checkpoint: dict[str, Any], path: Path, name: str | None) -> Host:
    """The host of a checkpoint's content, to be called `name`. Raises `HostError` for what is no such regressor."""
    architecture = checkpoint.get("architecture_name", "tabpfn_v2")
    spec = _regressor_spec(spec_named(architecture), architecture, checkpoint["config"], str(path))

    state = dict(checkpoint["state_dict"])
    criterion_borders = state.get("criterion.borders")
    state = {key: value for key, value in state.items() if not key.startswith("criterion.")}
    try:
        config, _ = spec.parse_config(checkpoint["config"])
        with torch.random.fork_rng(devices=[]):  # a network is drawn at random before its weights are there
            model = spec.build(config)
        model.load_state_dict(state)
    except Exception as error:
        raise HostError(f"{path} does not hold the weights that its own config describes: {error}") from error
    stored = checkpoint.get("inference_config")
    try:
        inference_config = tabpfn_api.inference_config_from(stored) if stored else tabpfn_api.default_inference_config()
    except Exception as error:
        raise HostError(f"{path} has an inference config that this TabPFN does not know: {error}") from error
    criterion = None
    if criterion_borders is not None:
        criterion = tabpfn_api.FullSupportBarDistribution(criterion_borders.float(), ignore_nan_targets=True)
    return Host(name, model.eval(), _with_cpu_limit(inference_config), criterion)


def _from_prior_labs() -> Host:
    """TabPFN's own route to its default v3 regressor; the version is named, as `auto` is v3.5."""
    path = tabpfn_api.prior_labs_path("v3")
    try:
        with torch.random.fork_rng(devices=[]):
            model, criterion, inference_config = tabpfn_api.load_prior_labs_regressor("v3")
    except Exception as error:
        raise HostError(
            f"TabPFN could not load its v3 regressor: {_first_line(error)}\n"
            "Either accept Prior Labs' licence at https://ux.priorlabs.ai, set TABPFN_TOKEN to your API key and run "
            f"again with a network; or put {path.name} into TabPFN's cache folder {path.parent} "
            "(TABPFN_MODEL_CACHE_DIR moves it); or use --host small."
        ) from error
    _spec_of_regressor(model, str(path))
    return Host("v3", model, _with_cpu_limit(inference_config), criterion)


def _from_regressor(regressor: TabPFNRegressor) -> Host:
    if not hasattr(regressor, "models_"):
        # Loads the model without data, and without leaving a trace on the user's estimator.
        regressor = copy.copy(regressor)
        try:
            tabpfn_api.initialize(regressor)
        except Exception as error:
            raise HostError(
                f"the regressor's model could not be loaded: {_first_line(error)} {_HOW_TO_GET_V3}"
            ) from error
    if len(regressor.models_) != 1:
        raise HostError(f"the regressor has {len(regressor.models_)} models; patch them one at a time")
    model = regressor.models_[0]
    spec = _spec_of_regressor(model, "the regressor's model")
    dtype = next(model.parameters()).dtype
    if dtype in (torch.float16, torch.bfloat16):
        warnings.warn(
            f"The regressor has run in {dtype} and rounded its weights; the host is made of the rounded ones. Patch a "
            "fresh regressor, or the host by name or path, to start from the original weights.",
            stacklevel=3,
        )
    criterion = getattr(regressor, "znorm_space_bardist_", None)
    if criterion is not None and len(criterion.borders) != len(spec.borders(model)):
        # A constant target leaves the regressor with a distribution of its own, which is not the host's.
        criterion = None
    config = _with_cpu_limit(regressor.inference_config_)
    return Host(None, _unpatched_clone(model), config, copy.deepcopy(criterion))


def _unpatched_clone(model: nn.Module) -> nn.Module:
    # In float32, which TabPFN starts from: an engine that ran in another precision has cast the model.
    clone = copy.deepcopy(model).to("cpu", torch.float32)
    unpatch(clone)
    return clone


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _spec_of_regressor(model: nn.Module, where: str) -> HostSpec:
    """The architecture of a model; `HostError` unless it is a regressor that can be patched."""
    inside = next((spec for child in model.children() if (spec := spec_of(child))), None)
    if inside is not None:
        raise HostError(f"{where} is a {type(model).__name__} around a {inside.label} model; give the model inside it")
    return _regressor_spec(spec_of(model), type(model).__name__, getattr(model, "config", None), where)


def _regressor_spec(spec: HostSpec | None, architecture: Any, config: Any, where: str) -> HostSpec:
    """Refuse by name what is no regressor of an architecture that can be patched."""
    if spec is None:
        known = "tabpfn_v2_5" if architecture == "base" else str(architecture)
        kind = known if known in tabpfn_api.ARCHITECTURES else f"unknown architecture {known}"
        raise HostError(f"{where} is a {kind} model, not a {_kinds()} regressor. {_HOW_TO_GET_V3}")
    if not spec.is_regressor(config):
        raise HostError(f"{where} is a {spec.label} classifier; only regressors can be patched. {_HOW_TO_GET_V3}")
    return spec


def _kinds() -> str:
    return " or ".join(spec.label for spec in HOST_SPECS)
