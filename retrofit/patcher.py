"""Walking a host's model, putting the O-classes on, and taking them off again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..calibration.variants import GATED, VARIANTS, check_variant
from ..patches.architectures import spec_of
from ..patches.host_spec import HostSpec
from .tabpfn_api import check_tabpfn


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


def known_spec(model: nn.Module) -> HostSpec:
    """The architecture of a model, patched or not. Raises `PatchError` for one that cannot be patched."""
    if (spec := spec_of(model)) is None:
        raise PatchError(f"a {type(model).__module__}.{type(model).__qualname__} is no host that can be patched")
    return spec


def carriers(model: nn.Module, variant: str) -> dict[str, str]:
    """The variant's carriers in a host: name of a norm or a door -> what the carrier is.

    Raises `PatchError` for a model with a module or a norm that is not known here, or with one that does not
    run its class's forward, whose patch would be without effect.
    """
    check_variant(variant)
    spec = known_spec(model)
    known = {spec.norm_class, *spec.left_alone}.union(*spec.classes.values())
    found: dict[str, str] = {}
    norms = set()
    for name, module in model.named_modules():
        kind = spec.host_class(module)
        if kind not in known and not isinstance(module, nn.Linear):
            raise PatchError(
                f"the model has a module this version does not know, {name or 'the model itself'} of class "
                f"{type(module).__module__}.{type(module).__qualname__}; it was not patched"
            )
        if changed := _what_changes_the_call(module):
            raise PatchError(
                f"{name or 'the model itself'} has {changed}, which the patched forward would pass by or run on other "
                "tensors; it was not patched. Take that off (of the model that you patch), and put it on the patched "
                "model if it is still wanted"
            )
        if kind is spec.norm_class:
            norms.add(name)
        for norm, carrier in spec.carriers.get(kind, {}).items():
            found[f"{name}.{norm}" if name else norm] = carrier
    if norms != found.keys():
        unexpected = ", ".join(sorted(norms ^ found.keys()))
        raise PatchError(f"the model's norms are not where {spec.label} has them: {unexpected}; it was not patched")
    if "door" in VARIANTS[variant]:
        for name, door in spec.doors.items():
            module = model.get_submodule(name)
            if spec.host_class(module) is not door.host_class:
                raise PatchError(
                    f"the model's {name} is a {type(module).__qualname__}, not {spec.label}'s; it was not patched"
                )
    found |= dict.fromkeys(spec.doors, "door")
    return {name: carrier for name, carrier in found.items() if carrier in VARIANTS[variant]}


def _what_changes_the_call(module: nn.Module) -> str:
    """What a call of the module does beside its class's forward, in words; empty for nothing."""
    if "forward" in vars(module):
        return "a forward of its own, set on the instance (accelerate and other wrappers do so)"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "been compiled in place by Module.compile"
    if hasattr(module, "parametrizations"):
        return "parametrizations (torch.nn.utils.parametrize)"
    if module._forward_pre_hooks or module._forward_hooks:
        return "forward hooks (as weight_norm and spectral_norm have)"
    return ""


def patch_model(model: nn.Module, variant: str, taus: Mapping[str, float]) -> list[Site]:
    """Patch a host's model in place and report every site.

    Weights and state-dict keys stay. Patching a patched model replaces the patch, so doing it twice
    is doing it once.

    Args:
        model: The host, or a patched one.
        variant: One of `VARIANTS`.
        taus: tau for each of the variant's `carriers`, by name.

    Raises:
        TabPFNDriftError: A TabPFN other than the one that the patches were written for.
        PatchError: A module that is not known or runs something else than its class's forward, or a carrier
            without a tau.
        ValueError: An unknown variant, or a tau that is not a positive number.
    """
    check_tabpfn()
    wanted = carriers(model, variant)
    missing, extra = wanted.keys() - taus.keys(), taus.keys() - wanted.keys()
    if missing or extra:
        wrong = f"none for {', '.join(sorted(missing))}" if missing else f"one too many: {', '.join(sorted(extra))}"
        raise PatchError(f"variant {variant!r} needs one tau for each of its carriers; there is {wrong}")
    for name, tau in taus.items():
        check_tau(tau, f"tau of {name}")

    unpatch(model)
    spec = known_spec(model)
    classes = spec.classes[variant]
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
    sites = []
    for name, carrier in wanted.items():
        module = model.get_submodule(name)
        if carrier == "door":
            module.__class__ = spec.doors[name].o_class
        else:
            module.__class__ = spec.gated_norm if carrier in GATED else spec.carrier_norm
        tau = float(taus[name])
        module.__dict__["tau"] = tau
        # A door or a readout's norm is the site itself; elsewhere the block has another forward.
        at = module if carrier in ("door", "readout") else model.get_submodule(name.rpartition(".")[0])
        sites.append(Site(name, carrier, spec.host_class(at).__name__, type(at).__name__, tau))
    if "door" in wanted.values():
        spec.wire(model)
    return sites


def check_tau(tau: float, what: str = "tau") -> None:
    """Raise `ValueError` unless tau is positive and within float32."""
    if not 0 < tau <= torch.finfo(torch.float32).max:
        raise ValueError(f"{what} must be a positive number within float32, not {tau!r}")


def unpatch(model: nn.Module) -> None:
    """Give every module of a patched model its host class back, and take away what the patch left on it.

    The model then computes what its host does, to the bit. A host, or any other module, is left as it is.
    """
    if (spec := spec_of(model)) is None:
        return
    for module in model.modules():
        if module is model or type(module) in spec.host_classes:
            module.__class__ = spec.host_class(module)
            for name in spec.patched_attributes:
                module.__dict__.pop(name, None)
