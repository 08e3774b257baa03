"""The folder of an evaluation: one writer, every finished case on disk at once, and what of it can be used again.

`settings.json` describes the plan that ran last, and `retrofit-*.json` hold the taus that were calibrated. A line of
`cases.jsonl` is a case: `{"dataset", "seed", "variants": [a record a variant]}`. A record's `key` is a hash of
everything that decides it, so that other plans in the same folder use it again, or leave it alone. `predictions/` holds
what was predicted; see `predictions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ..retrofit.files import write_text
from .folders import append_line, held
from .predictions import FOLDER as PREDICTIONS
from .predictions import Arrays, Predictions, read_predictions, write_predictions

SETTINGS, CASES = "settings.json", "cases.jsonl"
REPORTS = ("summary.json", "table.md", "deltas.png", "power.png", "cases.csv", "report.html")

_NUMBER = (int, float)
# What a record holds, and of which type.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("dataset", "variant", "precision", "device"), str),
    **dict.fromkeys(("seed", "n_train", "n_test", "n_columns"), int),
    **dict.fromkeys(("host_rmse", "variant_rmse", "rmse_delta_pct", "max_abs_diff_sd"), _NUMBER),
    **dict.fromkeys(("host_nll", "variant_nll", "host_seconds", "variant_seconds"), _NUMBER),
    **dict.fromkeys(("host_peak_mb", "variant_peak_mb"), (*_NUMBER, type(None))),
}
# What those of earlier versions lack, beside `key` and `workers`.
_LATER: dict[str, Any] = {
    **dict.fromkeys(("train_mean_rmse", "target_sd", "host_crps", "variant_crps"), _NUMBER),
    **dict.fromkeys((f"{who}_coverage_{share}" for who in ("host", "variant") for share in (80, 95)), _NUMBER),
}

# What settings hold, and of which type; of lists and dicts the type of what is in them, too.
_SETTINGS: dict[str, tuple[Any, Any]] = {
    "host": (dict, (str, type(None))),
    "variants": (dict, dict),
    "datasets": (list, str),
    "files_sha256": (dict, str),
    "seeds": (list, int),
    "versions": (dict, str),
    **dict.fromkeys(("max_train_rows", "max_test_rows"), (int, None)),
    **dict.fromkeys(("precision", "precision_used", "device"), (str, None)),
    "gpu": ((str, type(None)), None),
}
_LARGEST = 1e150  # of a figure, so that its square is one, too

# (dataset, seed) -> variant -> record
Finished = dict[tuple[str, int], dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class CaseResult:
    """A finished case.

    Attributes:
        dataset: Its dataset.
        seed: Its seed.
        variants: A flat record for each variant, as `runs.case_rows` lists them.
        predictions: By variant what was predicted, on the way from where the case ran to where it is written.
    """

    dataset: str
    seed: int
    variants: list[dict[str, Any]]
    predictions: Mapping[str, Arrays] = field(default_factory=dict, repr=False, compare=False)

    def line(self) -> str:
        """As in `cases.jsonl`."""
        content = {"dataset": self.dataset, "seed": self.seed, "variants": self.variants}
        return json.dumps(content, allow_nan=False)


def case_rows(cases: Iterable[CaseResult]) -> pd.DataFrame:
    """One row a case and variant.

    Columns: `dataset`, `seed`, `variant`, `n_train`, `n_test`, `n_columns`; with `host_` and `variant_` in front
    `rmse`, `nll` (mean negative log-likelihood of the test targets, in nats), `crps` (mean continuous ranked
    probability score, in the target's unit), `coverage_80` and `coverage_95` (the fraction of test targets inside the
    central interval), `seconds` (fit and predict) and `peak_mb`; `rmse_delta_pct`; `max_abs_diff_sd`, the largest
    change of a predicted mean in standard deviations of the training target; `precision` and `device`;
    `train_mean_rmse`, of predicting the train rows' mean; `target_sd`, the standard deviation of the test targets;
    `workers`, how many cases ran side by side: with more than one, `seconds` mean nothing; `key`, a hash of what
    decides the row. Records of earlier versions lack `crps`, `coverage_80`, `coverage_95` and `target_sd`, and perhaps
    `train_mean_rmse` and `workers`, which was one. `peak_mb` is in MiB: on a GPU what torch allocated, on Linux the
    resident size of the whole process that ran the case, and so of a worker what it shares with the others, too;
    elsewhere unknown.
    """
    records = [record for case in cases for record in case.variants]
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    # Names of files may be no UTF-8, which pandas' own strings cannot hold.
    texts = {name for name, values in columns.items() if any(isinstance(value, str) for value in values)}
    return pd.DataFrame({n: pd.Series(v, dtype=object if n in texts else None) for n, v in columns.items()})


@dataclass
class Run:
    """An open run folder.

    Attributes:
        folder: Where it is.
        settings: What decides the results of the plan that runs now; see `evaluate.Plan.settings`.
        cases: All that were run here, under whatever plan, oldest first.
        differences: In what the plan that ran here before differs in what decides cases that both have, in words.
    """

    folder: Path
    settings: dict[str, Any]
    cases: list[CaseResult]
    differences: list[str]

    def finished(self) -> Finished:
        """The records that the plan can use as they are: (dataset, seed) -> variant -> the last record.

        A case's records all have one host's figures: on another machine it may have rounded otherwise.
        """
        found: Finished = {}
        for case in self.cases:
            records = found.setdefault((case.dataset, case.seed), {})
            for record in case.variants:
                label = record["variant"]
                if label not in self.settings["variants"]:
                    continue
                if record["key"] == record_key(self.settings, case.dataset, case.seed, label):
                    if any(host_figures(other) != host_figures(record) for other in records.values()):
                        records.clear()
                    records[label] = record
        return found

    def missing(self) -> dict[tuple[str, int], list[str]]:
        """The plan's cases that have to be run, in its order: (dataset, seed) -> the variants without a record."""
        finished = self.finished()
        cases = [(dataset, seed) for dataset in self.settings["datasets"] for seed in self.settings["seeds"]]
        found = {
            case: [label for label in self.settings["variants"] if label not in finished.get(case, {})]
            for case in cases
        }
        return {case: labels for case, labels in found.items() if labels}

    def append(self, case: CaseResult) -> CaseResult:
        """Write a case's predictions and new records to disk, whole or not at all; return these with their keys.

        Raises `OSError`, with the file's name, if that fails.
        """
        records = [
            record | {"key": record_key(self.settings, case.dataset, case.seed, record["variant"])}
            for record in case.variants
        ]
        written = CaseResult(case.dataset, case.seed, records)
        line = written.line()
        for record in records:
            if record["variant"] in case.predictions:
                write_predictions(self.folder, record, case.predictions[record["variant"]])
        append_line(self.folder / CASES, line)
        self.cases.append(written)
        return written

    def results(self) -> list[CaseResult]:
        """The plan's cases that are finished for all of its variants, in its order."""
        finished, missing = self.finished(), self.missing()
        cases = [(dataset, seed) for dataset in self.settings["datasets"] for seed in self.settings["seeds"]]
        labels = self.settings["variants"]
        return [CaseResult(*case, [finished[case][label] for label in labels]) for case in cases if case not in missing]

    def predictions(self, dataset: str, seed: int) -> Predictions | None:
        """What host and the plan's variants predicted for a case; None where that is not kept.

        Raises `ValueError`, with its name, for a file that cannot be read.
        """
        return read_predictions(self.folder, self.finished().get((dataset, seed), {}).values())

    def retrofit_file(self, label: str) -> Path:
        """Where the calibrated retrofit of a variant is, or belongs."""
        return _retrofit_file(self.folder, self.settings, label)


@contextmanager
def open_run(folder: Path, settings: dict[str, Any]) -> Iterator[Run]:
    """Create a run's folder or take up the one that is there, as its only writer.

    Args:
        folder: Where.
        settings: Of the plan that is to run.

    Raises:
        ValueError: The folder is in use, holds a run that cannot be read, or something else than a run.
        OSError: It cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        stored = _read_settings(folder, "choose another --out")
        cases, mended = _read_cases(folder / CASES, "choose another --out")
        differences = []
        if stored is not None:
            differences = _differences(_shared(stored, settings), _shared(settings, stored))
        _remove_unfinished(folder)
        if any("key" not in record for case in cases for record in case.variants):
            if stored is None:
                raise ValueError(
                    f"{folder} holds cases but no {SETTINGS} that says how they were run; choose another --out"
                )
            cases, mended = _with_keys(cases, stored), True
            _rename_retrofits(folder, stored)
        if mended:
            write_text(folder / CASES, "".join(case.line() + "\n" for case in cases))
        if stored != settings:
            write_text(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
        yield Run(folder, settings, cases, differences)


def _remove_unfinished(folder: Path) -> None:
    """Remove what a killed run had begun to write (`files.replacing`)."""
    names = [Path(name) for name in (*REPORTS, CASES, SETTINGS)]
    patterns = [f".*{name.stem}.*.part{name.suffix}" for name in names] + [f"{PREDICTIONS}/.*.part.npz"]
    for pattern in patterns:
        for part in folder.glob(pattern):
            part.unlink(missing_ok=True)


def read_run(folder: Path) -> Run:
    """The run in a folder, of the plan that ran last, to be read only: nothing is written, and nobody kept out.

    Raises:
        ValueError: The folder holds no run, or one that cannot be read.
        OSError: A file cannot be read.
    """
    stored = _read_settings(folder, "name another run")
    if stored is None:
        raise ValueError(f"{folder} holds no run: it has no {SETTINGS}")
    cases, _ = _read_cases(folder / CASES, "name another run")
    return Run(folder, stored, _with_keys(cases, stored), [])


def host_figures(record: dict[str, Any]) -> tuple[float, float]:
    """What the host answered, to the bit."""
    return record["host_rmse"], record["host_nll"]


def record_key(settings: dict[str, Any], dataset: str, seed: int, label: str) -> str:
    """A hash of everything that decides a variant's record of a case."""
    deciding = {name: settings.get(name) for name in ("max_train_rows", "max_test_rows", "precision", "precision_used")}
    file = settings["files_sha256"].get(dataset)
    return _hash(_deciding_variant(settings, label) | deciding | {"dataset": dataset, "file": file, "seed": seed})


def _deciding_variant(settings: dict[str, Any], label: str) -> dict[str, Any]:
    deciding = {name: settings.get(name) for name in ("device", "gpu", "versions", "estimator")}
    return {"host": settings["host"]["sha256"], "variant": settings["variants"][label], **deciding}


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _retrofit_file(folder: Path, settings: dict[str, Any], label: str) -> Path:
    return folder / f"retrofit-{label}-{_hash(_deciding_variant(settings, label))[:8]}.json"


# ---- Reading ------------------------------------------------------------------------------------


def _read_settings(folder: Path, otherwise: str) -> dict[str, Any] | None:
    """The plan that ran last, or None in a new folder; `otherwise` is what to do where the folder will not do."""
    file = folder / SETTINGS
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        _check_settings(stored)
    except FileNotFoundError:
        if foreign := [name for name in REPORTS if (folder / name).exists()]:
            raise ValueError(f"{folder} holds {', '.join(foreign)} but no {SETTINGS} of a run; {otherwise}") from None
        return None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{file} is no run's settings ({_reason(error)}); {otherwise}") from error
    return stored


def _check_settings(stored: Any) -> None:
    """Raise `ValueError` unless all is there that is read from settings."""
    if not isinstance(stored, dict):
        raise ValueError("no JSON object")
    for name, (kind, inside) in _SETTINGS.items():
        value = stored.get(name, ...)  # of no kind
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not isinstance(value, kind) or any(not isinstance(i, inside) or isinstance(i, bool) for i in items):
            raise ValueError(f"without a proper {name!r}")
    if not isinstance(stored["host"].get("sha256"), str) or "name" not in stored["host"]:
        raise ValueError("without a proper 'host'")


def _read_cases(file: Path, otherwise: str) -> tuple[list[CaseResult], bool]:
    """The cases, and whether the end of the file has to be mended."""
    lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
    last = lines.pop()  # empty, unless a run was ended while it wrote a line
    cases = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                cases.append(_parse_case(line))
            except ValueError as error:
                raise ValueError(
                    f"{file}, line {number}: {_reason(error)}; remove that line (`oretrofit eval` runs its case again "
                    f"then), or {otherwise}"
                ) from error
    if last:
        try:
            cases.append(_parse_case(last))
        except ValueError:  # left there, the next case would be glued to it
            pass
    return cases, bool(last)


def _parse_case(line: bytes) -> CaseResult:
    """Raises `ValueError` for what is no finished case."""
    content = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(content, dict) or not isinstance(content.get("variants"), list) or not content["variants"]:
        raise ValueError("no case with variants")
    for record in content["variants"]:
        fields = _FIELDS if not isinstance(record, dict) else _FIELDS | {n: _LATER[n] for n in _LATER if n in record}
        for name, kind in fields.items():
            value = record.get(name, _FIELDS) if isinstance(record, dict) else _FIELDS
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"a variant without a proper {name!r}")
            if isinstance(value, _NUMBER) and not abs(value) <= _LARGEST:
                raise ValueError(f"{name!r} is not finite, or too large to be squared")
        if (record["dataset"], record["seed"]) != (content.get("dataset"), content.get("seed")):
            raise ValueError("a variant of another case")
    return CaseResult(content["dataset"], content["seed"], content["variants"])


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no figure")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg}"
    return str(error)


def _with_keys(cases: list[CaseResult], stored: dict[str, Any]) -> list[CaseResult]:
    """The cases of an earlier version's folder, whose one plan decided all of them."""

    def keyed(record: dict[str, Any]) -> dict[str, Any]:
        dataset, seed, label = (record[name] for name in ("dataset", "seed", "variant"))
        known = label in stored["variants"]
        return {"key": record_key(stored, dataset, seed, label) if known else None} | record

    return [CaseResult(case.dataset, case.seed, [keyed(record) for record in case.variants]) for case in cases]


def _rename_retrofits(folder: Path, stored: dict[str, Any]) -> None:
    """Give those of an earlier version their names of today."""
    for label in stored["variants"]:
        if (old := folder / f"retrofit-{label}.json").exists():
            old.replace(_retrofit_file(folder, stored, label))


def _shared(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What decides the cases that both have."""
    kept = {name: value for name, value in settings.items() if name not in ("seeds", "datasets")}
    for name in ("variants", "files_sha256"):
        kept[name] = {key: value for key, value in settings[name].items() if key in other[name]}
    kept["host"] = settings["host"]["sha256"][:12]
    return kept


def _differences(stored: Any, wanted: Any, name: str = "") -> list[str]:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        keys = list(dict.fromkeys([*stored, *wanted]))
        return [d for key in keys for d in _differences(stored.get(key), wanted.get(key), f"{name}.{key}".strip("."))]
    return [] if stored == wanted else [f"{name}: {json.dumps(stored)} there, {json.dumps(wanted)} here"]
