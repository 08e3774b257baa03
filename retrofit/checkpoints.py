"""A retrofit as an ordinary TabPFN checkpoint, whose architecture is the host's with the patch on.

TabPFN looks the architecture of a checkpoint up by its name. Importing this module registers one for the retrofits
of each host, so that `TabPFNRegressor(model_path="mine-v3.safetensors")` loads a patched model, and fit, save, load,
clone and pickle are TabPFN's own from there on.
"""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..patches.architectures import HOST_SPECS
from ..patches.host_spec import HostSpec
from . import tabpfn_api
from .files import replacing
from .hosts import RETROFIT_PREFIX, Host, HostError, host_in_checkpoint, read_checkpoint
from .patcher import known_spec, patch_model

SUFFIX = ".safetensors"

# Where a checkpoint's config has what `Retrofit.to_dict` says; TabPFN hands an architecture no more than the config.
_KEY = "oretrofit"


class RetrofitArchitecture:
    """The retrofits of one host architecture, as TabPFN asks the module of an architecture for its models."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec

    def parse_config(self, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The host's config, with the retrofit beside its fields, and what is not known of the host's."""
        parsed, unused = self.spec.parse_config({key: value for key, value in config.items() if key != _KEY})
        setattr(parsed, _KEY, config[_KEY])
        return parsed, unused

    def get_architecture(self, config: Any) -> nn.Module:
        """The host's network with the patch on; raises as of `patch_model`."""
        retrofit = getattr(config, _KEY)
        model = self.spec.build(self.spec.parse_config(asdict(config))[0])
        patch_model(model, retrofit["variant"], retrofit["tau"])
        return model


for _spec in HOST_SPECS:
    _name = RETROFIT_PREFIX + _spec.architecture
    if _name not in tabpfn_api.ARCHITECTURES:  # a module that is loaded again registers nothing new
        tabpfn_api.register_architecture(_name, RetrofitArchitecture(_spec))  # type: ignore[arg-type]


def write_retrofit(host: Host, retrofit: dict[str, Any], path: Path) -> None:
    """Write a host and what `Retrofit.to_dict` says as one checkpoint, whole or not at all.

    Raises:
        ValueError: A name by which TabPFN would take the file for another format or version.
        OSError: The file cannot be written.
    """
    spec = known_spec(host.model)
    version = tabpfn_api.checkpoint_version(path)
    if path.suffix != SUFFIX or version != spec.version:
        raise ValueError(
            f"TabPFN reads a checkpoint's format and version off its name, and would take {path.name!r} for a "
            f"{version} one: name it like {f'mine-{spec.version}{SUFFIX}'!r}"
        )
    state = dict(host.model.state_dict())
    if host.norm_criterion is not None:
        state |= {f"criterion.{name}": value for name, value in host.norm_criterion.state_dict().items()}
    config = host.model.config
    assert is_dataclass(config) and not isinstance(config, type)
    checkpoint = {
        "state_dict": state,
        "config": {**asdict(config), _KEY: retrofit},
        "architecture_name": RETROFIT_PREFIX + spec.architecture,
        "inference_config": asdict(host.inference_config),
    }
    with replacing(path) as part:
        tabpfn_api.save_as_safetensors(checkpoint, part)


def read_retrofit(path: Path) -> tuple[dict[str, Any], Host]:
    """What `write_retrofit` wrote: `Retrofit.to_dict`, and the unpatched host under the name that this gives it.

    Raises:
        HostError: A file that cannot be read, is a host and no retrofit, or holds no host that can be patched.
    """
    checkpoint = read_checkpoint(path)
    architecture = str(checkpoint.get("architecture_name"))
    config = dict(checkpoint["config"])
    if not architecture.startswith(RETROFIT_PREFIX) or _KEY not in config:
        raise HostError(f"{path} is a checkpoint, but of a host and not of a retrofit; see oretrofit.patch")
    retrofit = config.pop(_KEY)
    checkpoint |= {"architecture_name": architecture.removeprefix(RETROFIT_PREFIX), "config": config}
    return retrofit, host_in_checkpoint(checkpoint, path, retrofit["host"]["name"])
