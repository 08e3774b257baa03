"""A retrofit's sites as a user reads them: in a terminal, in a pipe, and in a notebook."""

from __future__ import annotations

import html
import io
import shutil

import pandas as pd

from ..patches.host_spec import HostSpec
from .printing import Cells, Titled, print_table, print_text


def site_tables(sites: pd.DataFrame, spec: HostSpec) -> list[Titled]:
    """The sites of `Retrofit.table`, a table for each class that was swapped.

    Names are shortened as the host's `HostSpec` has it; the columns in percent are quantiles of `||h||^2`.
    """
    header = ["site", "carrier", "tau"]
    calibrated = "sq_norm_q50" in sites
    if calibrated:
        header += ["1 %", "50 %", "99 %", "p min", "p med."]
    tables: dict[str, Cells] = {}
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
    return [(title, cells, 2) for title, cells in tables.items()]


def site_notes(spec: HostSpec) -> str:
    """What a reader of these tables has to know."""
    names = ", ".join(f"{short} = {name}" for name, short in spec.short_names.items())
    return f"1 %, 50 %, 99 %: quantiles of ||h||²; p: presence; both: receiver and source; {names}"


def as_text(summary: str, sites: pd.DataFrame, spec: HostSpec) -> str:
    """A summary and every site, as wide as the terminal is; 80 columns where there is none."""
    from rich.console import Console

    columns = shutil.get_terminal_size().columns
    file = io.StringIO()
    console = Console(
        file=file, width=columns, force_terminal=True, color_system=None, highlight=False, markup=False, emoji=False
    )
    print_text(console, f"{summary}\n")
    for title, (header, cells), left in site_tables(sites, spec):
        print_table(console, header, cells, title=title, left=left)
    print_text(console, site_notes(spec))
    return file.getvalue().rstrip("\n")


def as_html(summary: str, sites: pd.DataFrame) -> str:
    """The same for a notebook: the summary, and behind it the whole table."""
    table = sites.to_html(index=False, border=0, float_format="{:.4g}".format)
    return f"<details><summary>{html.escape(summary)}</summary>{table}</details>"


def _short_number(value: float) -> str:
    """At most six characters from 1e-4 to 1e6, for the narrow columns of the site table."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"
