"""`oretrofit patch`: a host patched and checked, and its sites as a user reads them."""

from __future__ import annotations

import itertools
from typing import Any

from ..calibration import settings
from .api import Retrofit, patch
from .check import near_identity, synthetic_cases
from .hosts import load_host
from .patcher import known_spec
from .printing import Cells
from .terminal import Begin

HELD_OUT_TABLES = 8  # on which host and variant are compared


def patch_and_check(
    host: str, variant: str, options: dict[str, Any], device: str, begin: Begin
) -> tuple[Retrofit, dict[str, float]]:
    """Patch a host, and compare its predictions before and after on held-out synthetic tables; see `near_identity`."""
    calibrated, count = begin("Calibrating", options["tables"]), itertools.count(1)
    retrofit = patch(load_host(host), variant, **options, device=device, on_table=lambda: calibrated(next(count)))
    checked, checks = begin("Checking", 2 * HELD_OUT_TABLES), itertools.count(1)
    cases = synthetic_cases(HELD_OUT_TABLES, options["seed"] + settings.HELD_OUT)
    return retrofit, near_identity(retrofit, cases, on_case=lambda: checked(next(checks)), device=device)


def patched_summary(retrofit: Retrofit, check: dict[str, float]) -> str:
    """What a user wants to know first: how near to its host the patched clone is, and how it was made."""
    chosen = ", ".join(f"{name} {value}" for name, value in retrofit.settings.items())
    return (
        f"{retrofit.variant} of {retrofit.host.name}: {len(retrofit.sites)} sites, {chosen}.\n"
        f"On {HELD_OUT_TABLES} held-out synthetic tables, in float32, against the host:\n"
        f"  RMSE change: mean {check['mean_rmse_delta_pct']:+.4f} %, largest {check['largest_rmse_delta_pct']:+.4f} %\n"
        f"  largest shift of a prediction: {check['max_abs_diff_sd']:.2g} target standard deviations\n"
    )


def site_notes(retrofit: Retrofit) -> str:
    """What a reader of the tables of sites has to know."""
    names = ", ".join(f"{short} = {name}" for name, short in known_spec(retrofit.model).short_names.items())
    return f"1 %, 50 %, 99 %: quantiles of ||h||²; p: presence; both: receiver and source; {names}"


def site_cells(retrofit: Retrofit) -> dict[str, Cells]:
    """Header and cells of a retrofit's sites, by what became of the class.

    Names are shortened as the host's `HostSpec` has it; the columns in percent are quantiles of `||h||^2`.
    """
    sites, spec = retrofit.table, known_spec(retrofit.model)
    header = ["site", "carrier", "tau"]
    calibrated = "sq_norm_q50" in sites
    if calibrated:
        header += ["1 %", "50 %", "99 %", "p min", "p med."]
    tables = {}
    for (host_class, o_class), group in sites.groupby(["host_class", "o_class"], sort=False):
        cells = []
        for site in group.to_dict("records"):
            row = [
                spec.shorten(site["name"]),
                site["carrier"].replace("receiver and source", "both"),
                f"{site['tau']:.3g}",
            ]
            if calibrated:
                row += [_short_number(site[f"sq_norm_q{q}"]) for q in ("01", "50", "99")]
                row += [f"{site[f'presence_{kind}']:.5f}" for kind in ("min", "median")]
            cells.append(row)
        tables[f"{host_class} -> {o_class}"] = (header, cells)
    return tables


def _short_number(value: float) -> str:
    """At most six characters from 1e-4 to 1e6, for the narrow columns of the site table."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"
