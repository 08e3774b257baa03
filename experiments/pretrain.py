"""Train the bundled small host from scratch on synthetic tables.

The architecture class is TabPFN's own `TabPFNV3` in a small configuration; the weights, the prior
(`oretrofit.calibration.prior`) and the training are this project's.

Shape suffixes: R rows, N train rows, B tables in the batch, C columns, L buckets.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from tabpfn.architectures.tabpfn_v3 import TabPFNV3Config, get_architecture
from torch.utils.data import DataLoader, Dataset

from ..calibration.prior import draw_sizes, draw_table
from ..calibration.settings import PRETRAIN_RATE, PRETRAIN_STEPS
from ..retrofit.files import replacing, write_text
from ..retrofit.hosts import load_host, weights_sha256
from ..retrofit.tabpfn_api import (
    FullSupportBarDistribution,
    InferenceConfig,
    PreprocessorConfig,
    save_as_safetensors,
)
from .folders import append_line, held
from .muon import Muon

HOST_FILE = "oretrofit-small-v3-regressor.safetensors"
STATE = "state.pt"
SAVE_EVERY = 250  # steps
HALVES = 2  # of a batch, with random numbers of their own: two processes trained the bundled host

SMALL_CONFIG = {
    "embed_dim": 32,
    "dist_embed_num_blocks": 2,
    "dist_embed_num_heads": 2,
    "dist_embed_num_inducing_points": 16,
    "feat_agg_num_blocks": 2,
    "feat_agg_num_heads": 2,
    "feat_agg_num_cls_tokens": 4,
    "nlayers": 6,
    "icl_num_heads": 4,
    "num_buckets": 500,
    "softmax_scaling_mlp_hidden_dim": 16,
}


@dataclass(frozen=True)
class PretrainSettings:
    """Everything that, with the code, decides the weights.

    Attributes:
        steps: Optimizer steps in all. The learning rate is constant after the warm-up and falls
            linearly to zero over the last `decay` share of them.
        seed: Seeds the initial weights and, with the step's number, every batch.
        start: As `hosts.load_host` takes it, a host of this architecture whose weights it begins with instead.
        learning_rate: Peak rate, for Muon (scaled to AdamW's update size) and AdamW alike.
        warmup: Steps of linear warm-up.
        decay: Share of the steps over which the rate falls to zero.
        max_rows: Largest table, train and test rows together.
        max_columns: Widest table.
        cells: Cells (rows x columns x tables) a batch aims at.
        batch_rows: Most rows (rows x tables) in a batch.
    """

    steps: int = PRETRAIN_STEPS
    seed: int = 0
    start: str | None = None
    learning_rate: float = PRETRAIN_RATE
    warmup: int = 100
    decay: float = 0.9
    max_rows: int = 1000
    max_columns: int = 40
    cells: int = 44_000
    batch_rows: int = 7_200


def new_host(seed: int) -> Any:
    """The small host with freshly initialised weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_architecture(TabPFNV3Config(**SMALL_CONFIG))


def host_inference_config() -> InferenceConfig:
    """The preprocessing that the bundled host asks `TabPFNRegressor` for."""
    return InferenceConfig(
        PREPROCESS_TRANSFORMS=[
            PreprocessorConfig(
                name="squashing_scaler_default", categorical_name="numeric", max_features_per_estimator=60
            ),
            PreprocessorConfig(name="quantile_uni_coarse", categorical_name="numeric", max_features_per_estimator=60),
        ],
        FINGERPRINT_FEATURE=False,
        SOFTMAX_TEMPERATURE=0.9,
        MAX_CPU_SAMPLES=5000,
    )


def save_host(model: Any, path: Path) -> None:
    """Write a checkpoint that `TabPFNRegressor(model_path=path)` loads.

    TabPFN reads the version off the file's name, so `path` must contain `v3`.
    """
    content = {
        "state_dict": model.state_dict(),
        "config": asdict(model.config),
        "architecture_name": "tabpfn_v3",
        "inference_config": asdict(host_inference_config()),
    }
    with replacing(path) as part:
        save_as_safetensors(content, part)


def draw_batch(settings: PretrainSettings, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The batch of a step: tables of one shape, in two halves that are drawn independently.

    Returns `x_RBC` and `y_RB`, the target standardised by its train rows, and the number N of
    train rows.
    """
    rng = np.random.default_rng([settings.seed, step])
    rows, columns = draw_sizes(rng, settings.max_rows, settings.max_columns)
    tables = int(np.clip(min(settings.cells // (rows * columns), settings.batch_rows // rows) // HALVES, 1, 64))
    train = int(rows * rng.uniform(0.3, 0.9))
    x, y = [], []
    for half in range(HALVES):
        rng = np.random.default_rng([settings.seed, step, half])
        for _ in range(tables):
            table = draw_table(rng, rows, columns)
            order = rng.permutation(rows)
            target = table.y[order]
            scale = target[:train].std()
            target = (target - target[:train].mean()) / (scale if scale > 1e-6 else 1.0)
            x.append(_preprocess(rng, table.X[order], train))
            y.append(np.clip(target, -50, 50))
    x_RBC = torch.from_numpy(np.stack(x, axis=1)).float()
    return x_RBC, torch.from_numpy(np.stack(y, axis=1)).float(), train


class _Batches(Dataset):
    """The batch of each step, which the step's number and the seed decide, whoever draws it."""

    def __init__(self, settings: PretrainSettings) -> None:
        self.settings = settings

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return draw_batch(self.settings, step)


def _preprocess(rng: Generator, X: np.ndarray, train: int) -> np.ndarray:
    """What TabPFN's preprocessors may do to a table before the model sees it."""
    kind = rng.random()
    if kind < 0.3:  # uniform quantiles of the train rows
        out = X.copy()
        for c in range(X.shape[1]):
            seen = np.sort(X[:train, c][np.isfinite(X[:train, c])])
            known = np.isfinite(X[:, c])
            if len(seen):
                left = np.searchsorted(seen, X[known, c], "left")
                right = np.searchsorted(seen, X[known, c], "right")
                out[known, c] = (left + right) / (2 * len(seen))
        return out
    if kind < 0.45:  # robust scaling and soft clipping
        center = np.nanmedian(X[:train], axis=0)
        spread = np.nanquantile(X[:train], 0.75, axis=0) - np.nanquantile(X[:train], 0.25, axis=0)
        z = (X - center) / np.where(spread > 1e-9, spread, 1.0)
        return z / np.sqrt(1 + (z / 3) ** 2)
    return X


def _optimizers(model: Any, settings: PretrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, readout and the rest."""
    block = ("projection.weight", "mlp.0.weight", "mlp.2.weight")
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        inside = name.endswith(block) and "base_mlp" not in name and "query_mlp" not in name
        (matrices if inside and not name.startswith("output_projection") else rest).append(p)
    muon = Muon(matrices, lr=settings.learning_rate, weight_decay=0.01)
    return [muon, torch.optim.AdamW(rest, lr=settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.98))]


def _rate(step: int, settings: PretrainSettings) -> float:
    decaying = (settings.steps - step) / (settings.decay * settings.steps)
    return min(1.0, (step + 1) / settings.warmup, decaying)


def what_is_kept(folder: Path) -> str:
    """What an interrupted training can go on from, in a sentence."""
    if (folder / STATE).exists():
        return f"The last state is in {folder}; the same command again resumes there."
    return f"There is no state yet (one is kept every {SAVE_EVERY} steps); the same command begins again."


def pretrain(
    settings: PretrainSettings,
    folder: Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    log_every: int = 25,
    save_every: int = SAVE_EVERY,
) -> Iterator[tuple[int, float]]:
    """Train the host, resuming from `folder` when it holds an earlier state.

    Writes `state.pt` (to resume), `loss.csv`, and at the end `oretrofit-small-v3-regressor.safetensors` into
    `folder`, as its only writer.

    Args:
        settings: What to train.
        folder: Where.
        device: `cpu`, in float32, or `cuda`, where forward passes are under bfloat16 autocast (its range is
            float32's, so gradients need no scaling) and weights, loss and optimizers in float32. An earlier state may
            be another device's.
        workers: Processes that draw the tables ahead, the same tables; by default none beside a CPU, which they would
            share, and one a core beside a GPU, up to 16.
        log_every: Steps.
        save_every: Steps.

    Yields:
        (step, mean loss since the last yield) every `log_every` steps: the negative log-likelihood of the bar
        distribution over standardised targets.

    Raises:
        ValueError: The folder is in use, holds a run with other settings, or a file that cannot be read; or
            the host to start from is none of this architecture.
        OSError: It cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if workers is None:
        workers = 0 if device == "cpu" else min(os.cpu_count() or 1, 16)
    with held(folder):
        yield from _train(settings, folder, torch.device(device), workers, log_every, save_every)


def _train(
    settings: PretrainSettings, folder: Path, device: torch.device, workers: int, log_every: int, save_every: int
) -> Iterator[tuple[int, float]]:
    state_file, log_file = folder / STATE, folder / "loss.csv"
    model = _first_weights(settings).to(device).train()
    distribution = FullSupportBarDistribution(model.regression_borders.clone())
    optimizers = _optimizers(model, settings)
    losses: list[torch.Tensor] = []
    began = time.monotonic()
    first = weights_sha256(model) if settings.start else None  # of a file only its name is in the settings
    start = _restore(state_file, settings, first, model, optimizers) if state_file.exists() else 0
    write_text(log_file, "".join(f"{line}\n" for line in ["step,loss,seconds", *_logged(log_file, start)]))

    on_gpu, steps = device.type == "cuda", range(start, settings.steps)
    batches = DataLoader(
        _Batches(settings),
        batch_size=None,
        sampler=steps,  # type: ignore[arg-type]
        num_workers=workers,
        pin_memory=on_gpu,
        generator=torch.Generator(),  # or it would draw from the caller's
    )
    for step, (x_RBC, y_RB, train) in zip(steps, batches, strict=True):
        x_RBC, y_RB = (part.to(device, non_blocking=True) for part in (x_RBC, y_RB))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _rate(step, settings)
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
            logits_MBL = model(x_RBC, y_RB[:train])
        loss = distribution(logits_MBL.float(), y_RB[train:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        done = step + 1
        if done % log_every == 0 or done == settings.steps:
            mean, losses = (
                torch.stack(losses).double().mean().item(),
                [],
            )  # a loss by itself would stall a GPU each step
            append_line(log_file, f"{done},{mean:.4f},{time.monotonic() - began:.0f}")
            yield done, mean
        if done % save_every == 0 or done == settings.steps:
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": done,
                "settings": asdict(settings),
                "first_weights": first,
            }
            content = io.BytesIO()  # torch's own writer does not say that a disk is full
            torch.save(state, content)
            with replacing(state_file) as part:
                part.write_bytes(content.getvalue())
    save_host(model.cpu().eval(), folder / HOST_FILE)


def _first_weights(settings: PretrainSettings) -> Any:
    model = new_host(settings.seed)
    if settings.start is not None:
        try:
            model.load_state_dict(load_host(settings.start).model.state_dict())
        except RuntimeError as error:  # other names or shapes
            raise ValueError(
                f"{settings.start} is no host of the small architecture, which is what is trained"
            ) from error
    return model


def _restore(
    file: Path, settings: PretrainSettings, first: str | None, model: Any, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Put an earlier run's state on model and optimizers; the number of steps that it had done."""
    with _naming(file):
        state = torch.load(file, weights_only=True, map_location="cpu")
        stored, step = state["settings"], state["step"]
    if stored != asdict(settings):
        raise ValueError(f"{file.parent} holds a run with other settings, {stored}; choose another --out")
    if state.get("first_weights") != first:
        raise ValueError(
            f"{file.parent} holds a run that began with other weights of {settings.start}; choose another --out"
        )
    with _naming(file):
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    return step


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """What is wrong with a state: torch raises its own errors, pickle's and zipfile's, and none names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{file} is no state of a training ({reason}); remove it, or choose another --out") from error


def _logged(file: Path, start: int) -> list[str]:
    """The lines of an earlier run's log, up to the state that is resumed from."""
    try:
        lines = (
            file.read_text(encoding="utf-8").split("\n")[1:-1] if file.exists() else []
        )  # the last may be half a line
        return [line for line in lines if int(line.split(",")[0]) <= start]
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{file} is no log of a training ({error}); remove it, or choose another --out") from error
