"""Walking a TabPFN v3 model, putting the O-classes on, and taking them off again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tabpfn.architectures import tabpfn_v3
from torch import nn

from ..patches.tabpfn_v3 import CARRIERS, O_CLASSES, CarrierNorm, GatedNorm

# Which carriers a variant reads presence from. `oa` puts OAttention at every attention; `full-o`
# adds OFFN and ONorm: the norms that feed the FFNs and those at the readouts are gated.
VARIANTS: dict[str, frozenset[str]] = {
    "oa": frozenset({"receiver", "source", "receiver and source"}),
    "full-o": frozenset({"receiver", "source", "receiver and source", "ffn", "readout"}),
}
_GATED = frozenset({"ffn", "readout"})

_HOST_NORM = tabpfn_v3._DtypeMatchingRMSNorm
_HOST_CLASSES = {o_class: host_class for host_class, o_class in O_CLASSES.items()}
_HOST_CLASSES |= {CarrierNorm: _HOST_NORM, GatedNorm: _HOST_NORM}

# Every other module of a v3 regressor, left as it is. Anything not named here is refused: a model
# must never be patched by half without a word.
_LEFT_ALONE = (
    tabpfn_v3.MLP,
    tabpfn_v3.SoftmaxScalingMLP,
    tabpfn_v3.RotaryEmbedding,
    tabpfn_v3.InducedSelfAttentionBlock,
    tabpfn_v3.FeatureDistributionEmbedder,
    tabpfn_v3.ColumnAggregator,
    nn.Sequential,
    nn.ModuleList,
    nn.GELU,
)


class PatchError(ValueError):
    """A model that cannot be patched as it is."""


@dataclass(frozen=True)
class Site:
    """One carrier of a patched model.

    Attributes:
        name: The norm that stands behind the carrier, by its name in the model.
        carrier: What the carrier is: a receiver, a source, both (self-attention), the input of an
            FFN, or of a readout.
        host_class: The class of the host's module at this site.
        o_class: The class it has now.
        tau: The scale of presence, in the unit of `||h||^2`.
    """

    name: str
    carrier: str
    host_class: str
    o_class: str
    tau: float


def check_variant(variant: str) -> None:
    """Raise `ValueError` unless `variant` is one of `VARIANTS`."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; there are: {', '.join(VARIANTS)}")


def host_class(module: nn.Module) -> type[nn.Module]:
    """The class a module has, or had before it was patched."""
    return _HOST_CLASSES.get(type(module), type(module))


def carriers(model: nn.Module, variant: str) -> dict[str, str]:
    """The variant's carriers in a host: norm name -> what its input is a carrier of.

    Raises `PatchError` if the model has a module or a norm that is not known here.
    """
    check_variant(variant)
    found: dict[str, str] = {}
    norms = set()
    for name, module in model.named_modules():
        kind = host_class(module)
        if kind is _HOST_NORM:
            norms.add(name)
        elif kind not in O_CLASSES and kind not in _LEFT_ALONE and not isinstance(module, nn.Linear):
            raise PatchError(
                f"the model has a module this version does not know, {name or 'the model itself'} of class "
                f"{type(module).__module__}.{type(module).__qualname__}; it was not patched"
            )
        for norm, carrier in CARRIERS.get(kind, {}).items():
            found[f"{name}.{norm}" if name else norm] = carrier
    if norms != found.keys():
        unexpected = ", ".join(sorted(norms ^ found.keys()))
        raise PatchError(f"the model's norms are not where TabPFN v3 has them: {unexpected}; it was not patched")
    return {name: carrier for name, carrier in found.items() if carrier in VARIANTS[variant]}


def patch_model(model: nn.Module, variant: str, taus: Mapping[str, float]) -> list[Site]:
    """Patch a v3 regressor in place and report every site.

    Weights and state-dict keys stay. Patching a patched model replaces the patch, so doing it twice
    is doing it once.

    Args:
        model: The host, or a patched one.
        variant: One of `VARIANTS`.
        taus: tau for each of the variant's `carriers`, by norm name.

    Raises:
        PatchError: A module that is not known, or a carrier without a tau.
        ValueError: An unknown variant, or a tau that is not a positive number.
    """
    wanted = carriers(model, variant)
    missing, extra = wanted.keys() - taus.keys(), taus.keys() - wanted.keys()
    if missing or extra:
        wrong = f"none for {', '.join(sorted(missing))}" if missing else f"one too many: {', '.join(sorted(extra))}"
        raise PatchError(f"variant {variant!r} needs one tau for each of its carriers; there is {wrong}")
    for name, tau in taus.items():
        if not 0 < tau <= torch.finfo(torch.float32).max:
            raise ValueError(f"tau of {name} must be a positive number within float32, not {tau!r}")

    unpatch_model(model)
    for module in model.modules():
        if type(module) in O_CLASSES:
            module.__class__ = O_CLASSES[type(module)]
    sites = []
    for name, carrier in wanted.items():
        norm = model.get_submodule(name)
        norm.__class__ = GatedNorm if carrier in _GATED else CarrierNorm
        tau = float(taus[name])
        norm.__dict__["tau"] = tau
        # A readout's norm is the site itself; elsewhere it is the block that changes its forward.
        at = norm if carrier == "readout" else model.get_submodule(name.rpartition(".")[0])
        sites.append(Site(name, carrier, host_class(at).__name__, type(at).__name__, tau))
    return sites


def model_taus(model: nn.Module) -> dict[str, float]:
    """tau of each site of a patched model, by norm name; empty for a host."""
    return {name: module.tau for name, module in model.named_modules() if isinstance(module, CarrierNorm)}


def unpatch_model(model: nn.Module) -> None:
    """Give every module of a patched model its host class back; a host is left as it is."""
    for module in model.modules():
        if type(module) in _HOST_CLASSES:
            module.__class__ = _HOST_CLASSES[type(module)]
            module.__dict__.pop("tau", None)
    # Compiled callables hold the patched forwards.
    model.__dict__.pop("_torch_compile_cache", None)
