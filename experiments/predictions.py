"""What host and variants predicted, kept in a run's folder: a compressed file for each record of `cases.jsonl`.

It is `predictions/DATASET-SEED-VARIANT-KEY.npz`, KEY the record's own, and holds float32 arrays: `y` (rows,), the test
targets; `host_mean` and `variant_mean` (rows,); `host_quantiles` and `variant_quantiles` (rows, levels) at `levels`
(levels,). All but the last are less `shift` and divided by `scale`, two float64 numbers: float32 has too few digits for
years in seconds, and too short a range for some targets. (Files of earlier versions have neither.) It is written whole
before its record is. No figure depends on it, and it may be removed: what a repository keeps of a run leaves it out.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..retrofit.files import replacing

FOLDER = "predictions"

# The central intervals of 80, 90, 95 and 98 % have their ends among them.
LEVELS: tuple[float, ...] = (0.01, 0.025, *(round(0.05 * i, 2) for i in range(1, 20)), 0.975, 0.99)

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model predicted for the test rows of a case, in the target's unit, as kept in float32.

    Attributes:
        mean: (rows,).
        quantiles: (rows, levels).
    """

    mean: np.ndarray
    quantiles: np.ndarray


@dataclass(frozen=True, eq=False)
class Predictions:
    """A case's predictions, by host and variants.

    Attributes:
        y: (rows,), the test targets.
        levels: (levels,), of the quantiles.
        answers: `host` first, then the variants whose predictions are there.
    """

    y: np.ndarray
    levels: np.ndarray
    answers: dict[str, Answer]


def make_arrays(y: np.ndarray, host: Answer, variant: Answer) -> dict[str, np.ndarray]:
    """What a file holds."""
    arrays = {"y": y}
    for name, answer in (("host", host), ("variant", variant)):
        arrays |= {f"{name}_mean": answer.mean, f"{name}_quantiles": answer.quantiles}
    shift, scale = np.array(np.mean(y)), np.array(np.std(y) or 1.0)
    scaled = {name: ((array - shift) / scale).astype(np.float32) for name, array in arrays.items()}
    return {**scaled, "levels": np.array(LEVELS, dtype=np.float32), "shift": shift, "scale": scale}


def write_predictions(folder: Path, record: Mapping[str, Any], arrays: Arrays) -> None:
    """Write the predictions of a record into a run's folder, whole or not at all. Raises `OSError`."""
    file = _file_of(folder, record)
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as part:
        np.savez_compressed(part, **arrays)  # type: ignore[arg-type]


def read_predictions(folder: Path, records: Iterable[Mapping[str, Any]]) -> Predictions | None:
    """The predictions of a case's records; None where none are kept (as in runs of earlier versions).

    Raises `ValueError`, with its name, for a file that cannot be read.
    """
    predictions: Predictions | None = None
    for record in records:
        file = _file_of(folder, record)
        try:
            with np.load(file) as content:
                arrays = _in_the_targets_unit({name: content[name] for name in content.files})
            host, variant = _answer(arrays, "host"), _answer(arrays, "variant")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{file} holds no predictions ({error}); remove it, and that case goes without") from error
        if predictions is None:
            predictions = Predictions(arrays["y"], arrays["levels"], {"host": host})
        elif arrays["y"].shape != predictions.y.shape or not np.array_equal(arrays["levels"], predictions.levels):
            raise ValueError(f"{file} holds predictions of other rows or levels than the files beside it; remove it")
        predictions.answers[record["variant"]] = variant
    return predictions


def _in_the_targets_unit(arrays: Arrays) -> dict[str, np.ndarray]:
    shift, scale, levels = arrays.get("shift", 0.0), arrays.get("scale", 1.0), arrays["levels"]
    of_rows = arrays.keys() - {"levels", "shift", "scale"}
    values = {name: scale * arrays[name].astype(np.float64) + shift for name in of_rows}
    if arrays["y"].ndim != 1 or not arrays["y"].size or not all(np.isfinite(value).all() for value in values.values()):
        raise ValueError("no rows, or values that are not finite")
    return {**values, "levels": levels}


def _answer(arrays: Arrays, whose: str) -> Answer:
    answer = Answer(arrays[f"{whose}_mean"], arrays[f"{whose}_quantiles"])
    if (
        answer.quantiles.shape != (*arrays["y"].shape, *arrays["levels"].shape)
        or answer.mean.shape != arrays["y"].shape
    ):
        raise ValueError("the shapes do not fit together")
    return answer


def _file_of(folder: Path, record: Mapping[str, Any]) -> Path:
    dataset = re.sub(r"[^A-Za-z0-9_.]+", "_", record["dataset"])[-40:]
    return folder / FOLDER / f"{dataset}-{record['seed']}-{record['variant']}-{record['key']}.npz"
