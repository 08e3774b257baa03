"""Finding and loading hosts: pretrained TabPFN v3 regressors."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures import ARCHITECTURES
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution
from tabpfn.architectures.tabpfn_v3 import TabPFNV3, TabPFNV3Config, get_architecture, parse_config
from tabpfn.base import ModelSpecs
from tabpfn.checkpoint import Checkpoint
from tabpfn.constants import ModelVersion
from tabpfn.inference_config import InferenceConfig, cpu_sample_limit
from tabpfn.model_loading import (
    _rename_old_inference_config_keys,
    get_cache_dir,
    load_model_criterion_config,
    resolve_model_path,
)
from torch import nn

from .patcher import host_class, unpatch_model

HOSTS_FOLDER = Path(__file__).parent / "hosts"
SMALL_HOST = HOSTS_FOLDER / "oretrofit-small-v3-regressor.safetensors"

# What `host` arguments take, besides a path. `small` is bundled; `random-v3` is full size with seeded
# random weights, for tests and benchmarks; `v3` is Prior Labs' default, through TabPFN's own loader.
HOST_NAMES = ("small", "random-v3", "v3")

HostLike: TypeAlias = str | Path | TabPFNRegressor | TabPFNV3

_HOW_TO_GET_V3 = (
    "Prior Labs' v3 regressor is the host `v3`; it needs their licence (TABPFN_TOKEN) or its checkpoint "
    "tabpfn-v3-regressor-v3_default.ckpt. The bundled host `small` needs nothing."
)


class HostError(ValueError):
    """A host that cannot be found, read, or patched; the message says what to do."""


@dataclass
class Host:
    """A TabPFN v3 regressor to be patched.

    Attributes:
        name: What it was loaded by (a name or an absolute path), or None for one given as an object.
        model: The network. Never modified: `specs` and the patcher hand out copies.
        inference_config: TabPFN's preprocessing settings that belong to the weights.
        norm_criterion: The bar distribution, where the checkpoint stores one beside the model.
    """

    name: str | None
    model: TabPFNV3
    inference_config: InferenceConfig
    norm_criterion: FullSupportBarDistribution | None = None

    @property
    def sha256(self) -> str:
        """SHA-256 over the weights: names, dtypes, shapes and bytes, whatever file they came from."""
        return weights_sha256(self.model)

    def specs(self, model: TabPFNV3 | None = None) -> ModelSpecs:
        """A fresh copy of the host (or of `model`, a patched clone of it) for `model_path=`.

        Always a copy: TabPFN's engines cast and move the model they are given in place.
        """
        return ModelSpecs(
            model=copy.deepcopy(self.model if model is None else model),
            architecture_config=self.model.config,
            inference_config=copy.deepcopy(self.inference_config),
            norm_criterion=copy.deepcopy(self.norm_criterion),
        )


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over a model's weights in the order of their names."""
    digest = hashlib.sha256()
    # nn.Module's own method: a patched model's warns its user about what is saved.
    for name, value in sorted(nn.Module.state_dict(model).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_host(host: HostLike = "small") -> Host:
    """Load a host.

    Args:
        host: `small`, `random-v3` or `v3` (see `HOST_NAMES`); the path of a v3 regressor
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
        _check_regressor(host_class(host).__name__, getattr(host, "config", None), "the given model")
        return Host(None, _unpatched_clone(host), _with_cpu_limit(_default_inference_config()))
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


def random_host(seed: int = 0, **config: Any) -> Host:
    """A v3 regressor with seeded random weights, full size unless `config` says otherwise.

    TabPFN initialises every output projection to zero, so that a fresh model predicts the same for
    every row; here they are drawn too, and the readout is made to give a normal distribution
    whose mean depends on the row.
    """
    standard = seed == 0 and not config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_architecture(TabPFNV3Config(**{"num_buckets": 5000, **config}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2 and not parameter.any():
                    parameter.normal_(std=1 / math.sqrt(parameter.shape[1]))
            # logits = a(row) * c - c^2 / 2 over bucket centres c: N(a, 1) up to a constant.
            borders = model.regression_borders.clamp(-6, 6)
            centers = (borders[1:] + borders[:-1]) / 2
            last = model.output_projection[-1]
            direction = torch.randn(last.in_features) / math.sqrt(last.in_features)
            last.weight.copy_(2 * centers[:, None] * direction + 0.1 * last.weight)
            last.bias.copy_(model.regression_borders.diff().log() - centers.square() / 2)
    return Host("random-v3" if standard else None, model.eval(), _with_cpu_limit(_default_inference_config()))


def _default_inference_config() -> InferenceConfig:
    return InferenceConfig.get_default("regression", ModelVersion.V2_5)


def _with_cpu_limit(config: InferenceConfig) -> InferenceConfig:
    # TabPFN sets this for models it loads from a path; through ModelSpecs the config's own
    # default of 1,000 rows would stand.
    return dataclasses.replace(config, MAX_CPU_SAMPLES=cpu_sample_limit(ModelVersion.V3))


def _from_checkpoint(path: Path, name: str) -> Host:
    try:
        if path.suffix == ".safetensors":
            checkpoint = Checkpoint(path).load()
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise HostError(f"cannot read the checkpoint {path}: {error}") from error
    if not isinstance(checkpoint, dict) or not all(
        isinstance(checkpoint.get(key), dict) for key in ("state_dict", "config")
    ):
        raise HostError(f"{path} is not a TabPFN checkpoint: it has no `state_dict` and `config`")
    architecture = checkpoint.get("architecture_name", "tabpfn_v2")
    _check_regressor(architecture, checkpoint["config"], str(path))

    state = dict(checkpoint["state_dict"])
    criterion_borders = state.get("criterion.borders")
    state = {key: value for key, value in state.items() if not key.startswith("criterion.")}
    try:
        config, _ = parse_config(checkpoint["config"])
        model = get_architecture(config)
        model.load_state_dict(state)
    except Exception as error:
        raise HostError(f"{path} does not hold the weights that its own config describes: {error}") from error
    stored = checkpoint.get("inference_config")
    try:
        inference_config = (
            InferenceConfig(**_rename_old_inference_config_keys(stored)) if stored else _default_inference_config()
        )
    except Exception as error:
        raise HostError(f"{path} has an inference config that this TabPFN does not know: {error}") from error
    criterion = None
    if criterion_borders is not None:
        criterion = FullSupportBarDistribution(criterion_borders.float(), ignore_nan_targets=True)
    return Host(name, model.eval(), _with_cpu_limit(inference_config), criterion)


def _from_prior_labs() -> Host:
    """TabPFN's own route to its default v3 regressor; the version is named, as `auto` is v3.5."""
    path = resolve_model_path(None, which="regressor", version="v3")[0][0]
    try:
        models, criterion, _, inference_config = load_model_criterion_config(
            None,
            check_bar_distribution_criterion=True,
            version="v3",
            estimator_type="regressor",
            download_if_not_exists=True,
        )
    except Exception as error:
        raise HostError(
            f"TabPFN could not load its v3 regressor: {_first_line(error)}\n"
            "Either accept Prior Labs' licence at https://ux.priorlabs.ai, set TABPFN_TOKEN to your API key and run "
            f"again with a network; or put {path.name} into TabPFN's cache folder {get_cache_dir()} "
            "(TABPFN_MODEL_CACHE_DIR moves it); or use --host small."
        ) from error
    _check_regressor(host_class(models[0]).__name__, getattr(models[0], "config", None), str(path))
    return Host("v3", models[0], _with_cpu_limit(inference_config), criterion)


def _from_regressor(regressor: TabPFNRegressor) -> Host:
    if not hasattr(regressor, "models_"):
        # Loads the model without data, and without leaving a trace on the user's estimator.
        regressor = copy.copy(regressor)
        try:
            regressor._initialize_model_variables()
        except Exception as error:
            raise HostError(
                f"the regressor's model could not be loaded: {_first_line(error)} {_HOW_TO_GET_V3}"
            ) from error
    if len(regressor.models_) != 1:
        raise HostError(f"the regressor has {len(regressor.models_)} models; patch them one at a time")
    model = regressor.models_[0]
    _check_regressor(host_class(model).__name__, getattr(model, "config", None), "the regressor's model")
    dtype = next(model.parameters()).dtype
    if dtype in (torch.float16, torch.bfloat16):
        warnings.warn(
            f"The regressor has run in {dtype} and rounded its weights; the host is made of the rounded ones. Patch a "
            "fresh regressor, or the host by name or path, to start from the original weights.",
            stacklevel=3,
        )
    criterion = getattr(regressor, "znorm_space_bardist_", None)
    if criterion is not None and len(criterion.borders) != model.n_out + 1:
        # A constant target leaves the regressor with a distribution of its own, which is not the host's.
        criterion = None
    config = _with_cpu_limit(regressor.inference_config_)
    return Host(None, _unpatched_clone(model), config, copy.deepcopy(criterion))


def _unpatched_clone(model: TabPFNV3) -> TabPFNV3:
    # In float32, which TabPFN starts from: an engine that ran in another precision has cast the model.
    clone = copy.deepcopy(model).to("cpu", torch.float32)
    unpatch_model(clone)
    return clone


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _check_regressor(architecture: Any, config: Any, where: str) -> None:
    """Refuse by name what is not a TabPFN v3 regressor."""
    if architecture not in ("tabpfn_v3", "TabPFNV3"):
        known = "tabpfn_v2_5" if architecture == "base" else str(architecture)
        kind = known if known in ARCHITECTURES else f"unknown architecture {known}"
        raise HostError(f"{where} is a {kind} model, not a TabPFN v3 regressor. {_HOW_TO_GET_V3}")
    classes = config.get("max_num_classes", -1) if isinstance(config, dict) else config.max_num_classes
    if classes is not None and classes >= 2:
        raise HostError(f"{where} is a TabPFN v3 classifier; only regressors can be patched. {_HOW_TO_GET_V3}")
