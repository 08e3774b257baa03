"""The variants by name, free of torch: the command line lists them before anything heavy is imported."""

from __future__ import annotations

# Which carriers a variant reads presence from. `oa` puts OAttention at every attention; `full-o`
# adds OFFN and ONorm: the norms that feed the FFNs and those at the readouts are gated. `closed` adds
# OInject at the doors, and closes the count of keys, the scaler and the grouping of columns.
VARIANTS: dict[str, frozenset[str]] = {
    "oa": frozenset({"receiver", "source", "receiver and source"}),
    "full-o": frozenset({"receiver", "source", "receiver and source", "ffn", "readout"}),
    "closed": frozenset({"receiver", "source", "receiver and source", "ffn", "readout", "door"}),
}

# The carriers whose norm is an ONorm.
GATED = frozenset({"ffn", "readout"})


def check_variant(variant: str) -> None:
    """Raise `ValueError` unless `variant` is one of `VARIANTS`."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; there are: {', '.join(VARIANTS)}")
