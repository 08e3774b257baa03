"""Shows a constant's value where a signature in the reference would show its name: `0.001`, not `settings.DELTA`."""

from __future__ import annotations

from typing import Any

import griffe

from oretrofit.calibration import settings


class Defaults(griffe.Extension):
    """Replaces defaults of the form `settings.NAME`."""

    def on_function(self, *, func: griffe.Function, **rest: Any) -> None:
        """Called with each function as it is read."""
        for parameter in func.parameters:
            module, _, name = str(parameter.default).partition(".")
            if module == "settings" and hasattr(settings, name):
                parameter.default = repr(getattr(settings, name))
