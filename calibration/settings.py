"""What commands and functions take by default, free of torch, so that `--help` can show it."""

from __future__ import annotations

# What `host` arguments take, besides a path. `small` is bundled; `random-v3` is full size with seeded
# random weights, for tests and benchmarks; `v3` is Prior Labs' default, through TabPFN's own loader.
HOST_NAMES = ("small", "random-v3", "v3")
HOST = "small"
VARIANT = "full-o"

# How tau is chosen.
DELTA = 1e-3
QUANTILE = 0.01
TABLES = 16
SEED = 20_000

# How the experiments compare.
PAPER_VARIANTS = ("oa", "full-o")
SEEDS = 3
MAX_ROWS = 1000
PRECISIONS = ("auto", "float32", "float64", "autocast")


def check_delta(delta: float, quantile: float) -> None:
    """Raise `ValueError` unless delta lies in (0, 1) and quantile in [0, 1]."""
    if not 0 < delta < 1:
        raise ValueError(f"delta is 1 minus a presence and must lie between 0 and 1, got {delta}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie in [0, 1], got {quantile}")


def check_seed(seed: int) -> None:
    """Raise `ValueError` unless `seed` is one for numpy's and scikit-learn's generators."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"a seed lies between 0 and {2**32 - 1}, got {seed}")
