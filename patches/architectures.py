"""The host architectures that can be patched. Another one is a module beside `tabpfn_v3_host`, and its name here."""

from __future__ import annotations

from torch import nn

from .host_spec import HostSpec
from .tabpfn_v3_host import TABPFN_V3

HOST_SPECS: tuple[HostSpec, ...] = (TABPFN_V3,)


def spec_of(model: nn.Module) -> HostSpec | None:
    """The architecture of a host, patched or not; None for any other module."""
    return next((spec for spec in HOST_SPECS if spec.host_class(model) is spec.model_class), None)


def spec_named(architecture: str) -> HostSpec | None:
    """The architecture of that name in a checkpoint; None for one that cannot be patched."""
    return next((spec for spec in HOST_SPECS if spec.architecture == architecture), None)
