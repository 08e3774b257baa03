"""The one door to TabPFN's private names, and the check that they are what this package was written for.

Everything else of the package imports `tabpfn` and `tabpfn.base.ModelSpecs` only, the patches of a host's
blocks aside, whose functions are checked here too (`HostSpec.sources`). What to do for a new TabPFN:
CONTRIBUTING.md.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import inspect
import linecache
from importlib.metadata import version as installed_version
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from tabpfn import TabPFNRegressor, base, browser_auth, inference, model_loading, utils
from tabpfn.architectures import ARCHITECTURES, register_architecture
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution
from tabpfn.base import ModelSpecs
from tabpfn.checkpoint import Checkpoint, save_as_safetensors
from tabpfn.constants import DEFAULT_SAVE_PEAK_MEMORY_FACTOR, ModelVersion
from tabpfn.errors import is_oom_error
from tabpfn.inference_config import InferenceConfig, cpu_sample_limit
from tabpfn.memory import should_save_peak_mem
from tabpfn.preprocessing import PreprocessorConfig
from tabpfn.preprocessing.pipeline_interface import PreprocessingPipeline, PreprocessingStep, PreprocessingStepResult
from tabpfn.utils import get_autocast_context, infer_autocast_inference_mode, infer_random_state
from torch import Tensor, nn

from ..patches.architectures import HOST_SPECS

__all__ = [
    "ARCHITECTURES",
    "DEFAULT_SAVE_PEAK_MEMORY_FACTOR",
    "Checkpoint",
    "FullSupportBarDistribution",
    "InferenceConfig",
    "ModelVersion",
    "PreprocessingPipeline",
    "PreprocessingStep",
    "PreprocessingStepResult",
    "PreprocessorConfig",
    "TabPFNDriftError",
    "Translation",
    "bar_distribution",
    "check_tabpfn",
    "checkpoint_version",
    "constant_prediction",
    "cpu_sample_limit",
    "decode",
    "default_inference_config",
    "drift",
    "fingerprint",
    "get_autocast_context",
    "has_token",
    "infer_autocast_inference_mode",
    "infer_random_state",
    "inference_config_from",
    "initialize",
    "is_oom_error",
    "load_prior_labs_regressor",
    "model_on",
    "prepare_member",
    "prior_labs_path",
    "register_architecture",
    "save_as_safetensors",
    "should_save_peak_mem",
    "show_nan",
    "translate",
    "translation_of",
    "uses_majority_downsample",
]

# ---- The estimator ------------------------------------------------------------------------------


def initialize(regressor: TabPFNRegressor) -> int:
    """Load a regressor's model without data, as `fit` does; the bytes of a number in its precision."""
    return regressor._initialize_model_variables()


def uses_majority_downsample(regressor: TabPFNRegressor) -> bool:
    """Whether it samples rows in a way that `predict_batched` refuses."""
    return regressor._uses_majority_downsample()


class Translation(NamedTuple):
    """How an ensemble member's logits come onto the borders of its regressor: from those that its target's transform
    makes of them. Arrays, which go to another process in a fraction of the time that tensors take.

    Attributes:
        left_out: Which logits count for nothing; None for none.
        weights: What each bucket gives to which, as TabPFN has it.
    """

    left_out: np.ndarray | None
    weights: tuple[np.ndarray, ...]


def translation_of(regressor: TabPFNRegressor, config: Any) -> Translation | None:
    """A member's translation, by the steps of `predict_batched`; None where its logits are on the borders already."""
    if config.target_transform is None:
        return None
    borders = regressor.znorm_space_bardist_.borders.cpu()
    left_out, is_descending, undone = utils.transform_borders_one(
        borders.numpy(),
        target_transform=config.target_transform,
        repair_nan_borders_after_transform=regressor.inference_config_.FIX_NAN_BORDERS_AFTER_TARGET_TRANSFORM,
    )
    own = torch.from_numpy(np.flip(undone).copy() if is_descending else undone)
    if left_out is None and own.dtype == borders.dtype and torch.equal(own, borders):
        return None
    return Translation(left_out, tuple(w.numpy() for w in utils._remap_weights(own, borders, dtype=torch.float32)))


def translate(regressor: TabPFNRegressor, logits_PL: Tensor, translation: Translation | None) -> Tensor:
    """What members of one translation add to their sums, P rows of logits, as `predict_batched` has it."""
    logits_PL = logits_PL.float()
    temperature = base.resolved_softmax_temperature(regressor)
    if temperature != 1:
        logits_PL = logits_PL / temperature
    if translation is None:
        found_PL = torch.softmax(logits_PL, dim=-1)
    else:
        if translation.left_out is not None:
            left_out = torch.from_numpy(translation.left_out).to(logits_PL.device)
            logits_PL = logits_PL.masked_fill(left_out, -torch.inf)
        weights = utils._RemapWeights(*(torch.from_numpy(w).to(logits_PL.device) for w in translation.weights))
        rows = max(1, utils._TRANSLATE_CHUNK_BUDGET_ELEMENTS // max(1, len(weights.source)))
        found = [utils._apply_remap_weights(part, weights) for part in logits_PL.split(rows)]
        found_PL = found[0] if len(found) == 1 else torch.cat(found)
    return found_PL.log() if regressor.average_before_softmax else found_PL


def decode(
    regressor: TabPFNRegressor,
    total_ML: Tensor,
    members: int,
    target_moments: tuple[float, float],
    output_type: str,
    quantiles: list[float],
) -> Any:
    """What `predict` returns, from the sum of the members' translated logits (M, L), as `predict_batched` does.

    Args:
        regressor: One that was fitted to the table, or to none with the same options.
        total_ML: The sum.
        members: Of how many.
        target_moments: Mean and deviation of the train rows' targets.
        output_type: As of `predict`.
        quantiles: As of `predict`.
    """
    mean, std = target_moments
    raw_bardist: Any = None
    if output_type == "full":
        regressor = copy.copy(regressor)
        regressor.y_train_mean_, regressor.y_train_std_ = mean, std
        regressor._rebuild_raw_space_bardist()
        raw_bardist = regressor.raw_space_bardist_
    return regressor._decode_batched_dataset(
        accumulated_logits=total_ML,
        n_estimators=members,
        raw_space_bardist=raw_bardist,
        znorm_space_bardist=regressor.znorm_space_bardist_,
        y_mean=mean,
        y_std=std,
        output_type=output_type,  # type: ignore[arg-type]
        quantiles=quantiles,
    )


def constant_prediction(regressor: TabPFNRegressor, rows: int, output_type: str, quantiles: list[float]) -> Any:
    """What `predict` returns for so many rows after a fit on a constant target."""
    return regressor._handle_constant_target(rows, output_type, quantiles)  # type: ignore[arg-type]


def prepare_member(member: Any, X_test: Any, device: torch.device, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """An ensemble member as its model takes it, by the steps of TabPFN's engines.

    Args:
        member: One of an engine's `ensemble_members`.
        X_test: The test rows as the member transforms them.
        device: Where the model is.
        dtype: What it was cast to; None for float32.

    Returns:
        x (R, 1, C), train rows first, and y (N,), on the device.
    """
    x_R1C, y_N = inference._prepare_model_inputs(device, dtype, member.X_train, X_test, member.y_train)
    x_R1C, _ = inference._maybe_run_gpu_preprocessing(
        x_R1C,
        gpu_preprocessor=member.gpu_preprocessor,
        num_train_rows=len(y_N),
        feature_schema=member.feature_schema,
    )
    return x_R1C, y_N


def model_on(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """A model on a device and in a dtype, by the steps of TabPFN's engines; the given one may be changed."""
    cache = inference._PerDeviceModelCache(model)  # type: ignore[arg-type]
    cache.to([device])
    if dtype is not None:
        cache.set_dtype(dtype)
    return cache.get(device)


def show_nan(model: nn.Module) -> None:
    """Let a model's output be NaN where it is; TabPFN makes it 0, and so hides what a check is after."""
    model._nan_safe_output = False  # type: ignore[assignment]


# ---- Models and checkpoints ---------------------------------------------------------------------


def bar_distribution(specs: ModelSpecs) -> FullSupportBarDistribution:
    """The distribution that an estimator built from specs decodes logits with."""
    return base._regression_distribution_from_specs(specs)


def default_inference_config() -> InferenceConfig:
    """What TabPFN takes where a checkpoint holds none."""
    return InferenceConfig.get_default("regression", ModelVersion.V2_5)


def inference_config_from(stored: dict[str, Any]) -> InferenceConfig:
    """The inference config of a checkpoint, under today's names."""
    return InferenceConfig(**model_loading._rename_old_inference_config_keys(stored))


def checkpoint_version(path: Path) -> str:
    """The version, such as `v3`, that TabPFN takes a checkpoint for: it goes by the file's name."""
    return model_loading.resolve_model_version(path).value


def has_token() -> bool:
    """Whether TabPFN would find a token for Prior Labs' licence: in `TABPFN_TOKEN`, or in a file that it keeps."""
    return browser_auth.get_cached_token() is not None


def prior_labs_path(version: str) -> Path:
    """Where TabPFN keeps its default regressor of a version, whether or not it is there."""
    return model_loading.resolve_model_path(None, which="regressor", version=version)[0][0]  # type: ignore[call-overload]


def load_prior_labs_regressor(
    version: str,
) -> tuple[nn.Module, FullSupportBarDistribution, InferenceConfig]:
    """TabPFN's default regressor of a version, downloaded where it is not cached, by TabPFN's own route."""
    models, criterion, _, config = model_loading.load_model_criterion_config(  # type: ignore[call-overload]
        None,
        check_bar_distribution_criterion=True,
        version=version,
        estimator_type="regressor",
        download_if_not_exists=True,
    )
    return models[0], criterion, config


# ---- Drift --------------------------------------------------------------------------------------


class TabPFNDriftError(RuntimeError):
    """The installed TabPFN is not the one that the patches were written for."""


# What is called here, or whose way is followed here and in `ragged/`, and the fingerprint of its source.
SOURCES = {
    "tabpfn.base:_regression_distribution_from_specs": "b40845a2814c",
    "tabpfn.base:get_embeddings": "bb821a4de97c",
    "tabpfn.inference:InferenceEngineOnDemand.__init__": "1503b11bfe61",
    "tabpfn.inference:_PerDeviceModelCache.get": "490fe2dbc8fe",
    "tabpfn.inference:_PerDeviceModelCache.set_dtype": "f0b2733045b0",
    "tabpfn.inference:_PerDeviceModelCache.to": "10446077a50b",
    "tabpfn.inference:_maybe_run_gpu_preprocessing": "ac97e0e00f07",
    "tabpfn.inference:_prepare_model_inputs": "eddf4e74c67c",
    "tabpfn.model_loading:_build_model": "b2b9585ad3d2",
    "tabpfn.model_loading:_rename_old_inference_config_keys": "324c119ddcc7",
    "tabpfn.model_loading:load_model_criterion_config": "aa0ddf5b6970",
    "tabpfn.model_loading:resolve_model_path": "2c649d60791f",
    "tabpfn.model_loading:resolve_model_version": "dbed26ebf6ef",
    "tabpfn.model_loading:save_tabpfn_model": "3fd293a721ee",
    "tabpfn.preprocessing.ensemble:TabPFNEnsembleMember.transform_X_test": "623f57e98dcb",
    "tabpfn.preprocessing.ensemble:TabPFNEnsemblePreprocessor.fit_transform_ensemble_members_iterator": "ea332e35eea8",
    "tabpfn.preprocessing.pipeline_factory:create_preprocessing_pipeline": "dd0ba2deec7b",
    "tabpfn.preprocessing.pipeline_interface:PreprocessingPipeline._process_steps": "12b64eb32505",
    "tabpfn.preprocessing.steps:EncodeCategoricalFeaturesStep._get_transformer": "48dc8769d2ac",
    "tabpfn.preprocessing.transform:_fit_preprocessing_one": "784136076ea1",
    "tabpfn.preprocessing.transform:_transform_labels_one": "e48934dcb3be",
    "tabpfn.regressor:TabPFNRegressor._decode_batched_dataset": "01890d8c8200",
    "tabpfn.regressor:TabPFNRegressor._handle_constant_target": "edb51a49b503",
    "tabpfn.regressor:TabPFNRegressor._initialize_model_variables": "35cc498a0b3a",
    "tabpfn.regressor:TabPFNRegressor._rebuild_raw_space_bardist": "6a33d9699882",
    "tabpfn.regressor:TabPFNRegressor._reduce_accumulated_logits": "46ace0dbc613",
    "tabpfn.regressor:TabPFNRegressor._translate_batched_logits": "aeeb1b5a039b",
    "tabpfn.regressor:TabPFNRegressor._uses_majority_downsample": "060a43d13a5c",
    "tabpfn.regressor:TabPFNRegressor.predict_batched": "d6577c15691a",
    "tabpfn.regressor:get_all_reshape_feature_distribution_preprocessors": "191fd0788150",
    "tabpfn.utils:_apply_remap_weights": "9355c1577d06",
    "tabpfn.utils:_remap_weights": "8fc6d01c6bca",
    "tabpfn.utils:transform_borders_one": "cbe513f93429",
    "tabpfn.utils:translate_probs_across_borders": "b7b8165bf005",
}


def fingerprint(name: str) -> str:
    """The first 12 digits of the SHA-256 of a function's source; `missing` where there is no such function.

    Args:
        name: `module:qualified name`.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        code = inspect.unwrap(found).__code__
    except (ImportError, AttributeError):
        return "missing"
    return _source_digest(code.co_filename, code.co_firstlineno, code)


@functools.cache  # tokenising all of them at each patch takes a good part of a second
def _source_digest(file: str, line: int, code: CodeType) -> str:
    # Not `inspect.getsource`, which looks for the module among all that are loaded, and wakes lazy ones.
    lines = inspect.getblock(linecache.getlines(file)[line - 1 :])
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


def drift() -> dict[str, tuple[str, str]]:
    """What of TabPFN differs from what this package was written for: its fingerprints here and now, by name."""
    known = SOURCES.copy()
    for spec in HOST_SPECS:
        known |= spec.sources
    found = {name: (expected, fingerprint(name)) for name, expected in known.items()}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def check_tabpfn() -> None:
    """Raise `TabPFNDriftError`, naming everything that differs, if the installed TabPFN is not the known one."""
    if differing := drift():
        names = "\n".join(f"  {name} ({before}, now {now})" for name, (before, now) in differing.items())
        raise TabPFNDriftError(
            f"TabPFN {installed_version('tabpfn')} is not the one that oretrofit's patches were written for; a patch "
            f"might be without effect. Nothing was patched. These differ:\n{names}\nInstall tabpfn 9.2.0, or see "
            "CONTRIBUTING.md on following a new TabPFN."
        )
