"""Walking a TabPFN v3 model, putting the O-classes on, and taking them off again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tabpfn.architectures import tabpfn_v3
from torch import nn

from ..patches.tabpfn_v3 import CARRIERS, O_CLASSES, CarrierNorm, GatedNorm
from ..patches.tabpfn_v3_closed import CLOSED_CLASSES, DOORS, OCellEmbedding, OColumnAggregator, OTargetEncoder

# Which carriers a variant reads presence from. `oa` puts OAttention at every attention; `full-o`
# adds OFFN and ONorm: the norms that feed the FFNs and those at the readouts are gated. `closed` adds
# OInject at the doors, and closes the count of keys, the scaler and the grouping of columns.
VARIANTS: dict[str, frozenset[str]] = {
    "oa": frozenset({"receiver", "source", "receiver and source"}),
    "full-o": frozenset({"receiver", "source", "receiver and source", "ffn", "readout"}),
    "closed": frozenset({"receiver", "source", "receiver and source", "ffn", "readout", "door"}),
}
_GATED = frozenset({"ffn", "readout"})

_HOST_NORM = tabpfn_v3._DtypeMatchingRMSNorm
_HOST_CLASSES = {o_class: host_class for host_class, o_class in [*O_CLASSES.items(), *CLOSED_CLASSES.items()]}
_HOST_CLASSES |= {CarrierNorm: _HOST_NORM, GatedNorm: _HOST_NORM}
_HOST_CLASSES |= {OCellEmbedding: nn.Linear, OTargetEncoder: nn.Linear}
_HOST_CLASSES |= {OColumnAggregator: tabpfn_v3.ColumnAggregator}

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
        name: The norm that stands behind the carrier, or the door that adds to it, by its name in
            the model.
        carrier: What the carrier is: a receiver, a source, both (self-attention), the input of an
            FFN or of a readout, or what something is added to at a door.
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
    """The variant's carriers in a host: name of a norm or a door -> what the carrier is.

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
    if variant == "closed":
        for name, o_class in DOORS.items():
            door = model.get_submodule(name)
            if host_class(door) is not _HOST_CLASSES[o_class]:
                raise PatchError(
                    f"the model's {name} is a {type(door).__qualname__}, not TabPFN v3's; it was not patched"
                )
    found |= dict.fromkeys(DOORS, "door")
    return {name: carrier for name, carrier in found.items() if carrier in VARIANTS[variant]}


def patch_model(model: nn.Module, variant: str, taus: Mapping[str, float]) -> list[Site]:
    """Patch a v3 regressor in place and report every site.

    Weights and state-dict keys stay. Patching a patched model replaces the patch, so doing it twice
    is doing it once.

    Args:
        model: The host, or a patched one.
        variant: One of `VARIANTS`.
        taus: tau for each of the variant's `carriers`, by name.

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
    classes = CLOSED_CLASSES if variant == "closed" else O_CLASSES
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
    sites = []
    for name, carrier in wanted.items():
        module = model.get_submodule(name)
        if carrier == "door":
            module.__class__ = DOORS[name]
        else:
            module.__class__ = GatedNorm if carrier in _GATED else CarrierNorm
        tau = float(taus[name])
        module.__dict__["tau"] = tau
        # A door or a readout's norm is the site itself; elsewhere the block has another forward.
        at = module if carrier in ("door", "readout") else model.get_submodule(name.rpartition(".")[0])
        sites.append(Site(name, carrier, _HOST_CLASSES[type(at)].__name__, type(at).__name__, tau))
    if variant == "closed":
        # Not a submodule of the cell embedding: its weights would be listed twice.
        model.x_embed.__dict__["target"] = model.col_y_encoder
    return sites


def model_taus(model: nn.Module) -> dict[str, float]:
    """tau of each site of a patched model, by name; empty for a host."""
    return {name: vars(module)["tau"] for name, module in model.named_modules() if "tau" in vars(module)}


def unpatch_model(model: nn.Module) -> None:
    """Give every module of a patched model its host class back; a host is left as it is."""
    for module in model.modules():
        if type(module) in _HOST_CLASSES:
            module.__class__ = _HOST_CLASSES[type(module)]
            module.__dict__.pop("tau", None)
            module.__dict__.pop("target", None)
    # Compiled callables hold the patched forwards.
    model.__dict__.pop("_torch_compile_cache", None)
