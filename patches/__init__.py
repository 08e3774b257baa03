"""The O-operators, and the O-variants of TabPFN v3's blocks. Depends on torch and TabPFN only."""

from .operators import (
    OFFN,
    OAttention,
    ONorm,
    OTransformer,
    OTransformerBlock,
    oattention,
    oinject,
    ostandardize,
)
from .presence import gate, log_presence, presence, squared_norm
from .structure import Structure

__all__ = [
    "OFFN",
    "OAttention",
    "ONorm",
    "OTransformer",
    "OTransformerBlock",
    "Structure",
    "gate",
    "log_presence",
    "oattention",
    "oinject",
    "ostandardize",
    "presence",
    "squared_norm",
]
