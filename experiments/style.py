"""How things are called and drawn in the tables and figures of every experiment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from .datasets import split_spec

# A variant's marker and colour.
STYLES: Mapping[str, tuple[str, str]] = {
    "identity": ("s", "#8c8c8c"),
    "oa": ("o", "#1f6fb4"),
    "full-o": ("^", "#c8501e"),
    "closed": ("D", "#2b8a3e"),
}
OTHER_STYLE = ("D", "#555555")


def short_datasets(specs: Sequence[str]) -> dict[str, str]:
    """Each dataset's spec -> its short name, where no other has the same.

    Of a file that is without folders, but for those that tell it from others; of a table of a package, its own name.
    """
    files = {spec: (found[0].parts, found[1]) for spec in specs if (found := split_spec(spec))}
    names = {spec: spec for spec in specs}
    for folders in range(max((len(parts) for parts, _ in files.values()), default=0), 0, -1):
        shorter = {spec: f"{PurePath(*parts[-folders:])}#{target}" for spec, (parts, target) in files.items()}
        taken = Counter({**names, **shorter}.values())
        names |= {spec: name for spec, name in shorter.items() if taken[name] == 1}
    items = {spec: spec.rpartition("/")[2] for spec in specs if spec.startswith("rdata:")}
    taken = Counter({**names, **items}.values())
    names |= {spec: item for spec, item in items.items() if taken[item] == 1}
    # A name may hold ends of lines, and a file's bytes that are no UTF-8, which neither a table nor a terminal takes.
    return {
        spec: re.sub(
            r"[\x00-\x1f]", lambda found: repr(found[0])[1:-1], name.encode("utf-8", "backslashreplace").decode()
        )
        for spec, name in names.items()
    }
