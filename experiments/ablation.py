"""Why OAttention alone does not do: where an inserted zero token wakes up, in three hosts of equal weights.

Shape suffixes: B batch, S tokens, T the same tokens with zero tokens inserted, H heads, D head width,
E hidden width. The experiment is the paper's (Gong, 2026); its sizes, weights and tau are not known.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches.operators import OFFN, OAttention, OTransformer, OTransformerBlock
from ..retrofit.files import replacing
from ..retrofit.printing import Cells

WIDTH, HEADS, TOKENS, NULLS = 64, 4, 16, 16

# Live tokens have ||h||^2 around WIDTH: their presence is 1 in float32.
TAU = 1e-6

# What of the OTransformer each host lacks: `standard` all presence, `oa-only` that of FFNs and norms.
HOSTS = ("standard", "oa-only", "otransformer")

_SMALLEST = 1e-8  # what the figure tells from 0
_STYLES = {"standard": ("s", "#8c8c8c", ":"), "oa-only": ("o", "#1f6fb4", "--"), "otransformer": ("^", "#5a1e08", "-")}

PAPER = "The paper's L_inf: about 7.98 for OA-only, about 0 for OTransformer; its summaries do not say of which states."


class PlainAttention(nn.Module):
    """Softmax attention with the projections of an `OAttention`: presence plays no part."""

    def __init__(self, attention: OAttention) -> None:
        super().__init__()
        self.projections = attention

    def forward(self, h_BSE: Tensor, *, norm: nn.Module, visible: Tensor | None = None) -> Tensor:
        """Self-attention on `norm(h)`: (B, S, E), the residual branch."""
        parts, x_BSE = self.projections, norm(h_BSE)
        q_BHSD, k_BHSD, v_BHSD = (
            projection(x_BSE).unflatten(-1, (parts.num_heads, -1)).transpose(1, 2)
            for projection in (parts.q_projection, parts.k_projection, parts.v_projection)
        )
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=visible)
        return parts.out_projection(out_BHSD.transpose(1, 2).flatten(-2))


class PlainFFN(nn.Module):
    """`h + FFN(LayerNorm(h))` with the parts of an `OFFN`: presence plays no part."""

    def __init__(self, offn: OFFN) -> None:
        super().__init__()
        onorm, *layers = offn.ffn.children()  # type: ignore[attr-defined]
        self.ffn = nn.Sequential(onorm.norm, *layers)  # type: ignore[arg-type]

    def forward(self, h: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        return h + self.ffn(h)


def random_case(blocks: int, seed: int) -> tuple[OTransformer, Tensor, Tensor]:
    """An OTransformer with random weights, `TOKENS` random tokens, and places for `NULLS` zero tokens.

    Linear weights are N(0, 1 / fan_in), LayerNorm weights N(1, 1), all biases N(0, 0.5^2), the tokens'
    entries N(0, 1). Chosen so that the old tokens of OA-only shift by more than 1, which is the order
    of the paper's figure; with torch's own initialisation it is 0.5.

    Returns:
        The model and the tokens (S, E), in float32 on the CPU; where the zeros go in (T,), bool.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):  # without torch's own initialisation, which draws from the global generator
        model = OTransformer(WIDTH, HEADS, blocks, TAU)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5, generator=generator)
            elif isinstance(module, nn.LayerNorm):
                module.weight.normal_(1, 1, generator=generator)
            else:
                continue
            if module.bias is not None:
                module.bias.normal_(0, 0.5, generator=generator)
    h_SE = torch.randn(TOKENS, WIDTH, generator=generator)
    is_null_T = torch.randperm(TOKENS + NULLS, generator=generator) < NULLS
    return model, h_SE, is_null_T


def hosts_of(model: OTransformer) -> dict[str, OTransformer]:
    """The three `HOSTS` with the weights of one OTransformer; `otransformer` is the model itself."""
    oa_only = copy.deepcopy(model)
    oa_only.norm = oa_only.norm.norm  # type: ignore[assignment]
    for block in _blocks(oa_only):
        block.ffn = PlainFFN(block.ffn)  # type: ignore[assignment]
    standard = copy.deepcopy(oa_only)
    for block in _blocks(standard):
        block.attention = PlainAttention(block.attention)  # type: ignore[assignment]
    return dict(zip(HOSTS, (standard, oa_only, model), strict=True))


def sublayers(blocks: int) -> list[tuple[int, str]]:
    """Block (from 1) and name of each state in `sublayer_states`; the final norm follows the last block."""
    return [(b + 1, name) for b in range(blocks) for name in ("attention", "ffn")] + [(blocks, "final norm")]


def sublayer_states(model: OTransformer, h_SE: Tensor) -> list[Tensor]:
    """The residual stream after every attention and FFN, and the final norm's output, (S, E) each."""
    states: list[Tensor] = []
    hooks = []
    for block in _blocks(model):
        hooks.append(block.ffn.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])))
        hooks.append(block.ffn.register_forward_hook(lambda _, inputs, output: states.append(output)))
    try:
        with torch.inference_mode():
            states.append(model(h_SE[None]))
    finally:
        for hook in hooks:
            hook.remove()
    return [state_BSE[0] for state_BSE in states]


def insert_zeros(model: OTransformer, h_SE: Tensor, is_null_T: Tensor) -> pd.DataFrame:
    """Run a host with and without zero tokens inserted.

    Returns:
        A row for each of `sublayers`: `block`, `sublayer`, `shift` (largest |difference| of an entry
        of an old token's state), `null_norm` (largest ||h|| of an inserted token), `null_entry`
        (largest |entry| of one) and `state` (largest |entry| of an old token).
    """
    h_TE = h_SE.new_zeros(len(is_null_T), h_SE.shape[1])
    h_TE[~is_null_T] = h_SE
    rows = []
    places = sublayers(len(model.blocks))
    for place, before_SE, after_TE in zip(
        places, sublayer_states(model, h_SE), sublayer_states(model, h_TE), strict=True
    ):
        null, old_SE = after_TE[is_null_T], after_TE[~is_null_T]
        figures = {
            "shift": (old_SE - before_SE).abs().max(),
            "null_norm": null.norm(dim=-1).max(),
            "null_entry": null.abs().max(),
            "state": old_SE.abs().max(),
        }
        rows.append(dict(zip(("block", "sublayer"), place, strict=True)) | {k: float(v) for k, v in figures.items()})
    return pd.DataFrame(rows)


def ablate(*, blocks: int = 2, seeds: int = 100, device: str = "cpu") -> pd.DataFrame:
    """Insert zero tokens into the three hosts, for each of the seeds 0 to `seeds` - 1.

    Each seed draws weights, tokens and places (`random_case`); everything is in float32.

    Args:
        blocks: Transformer blocks, at least 1.
        seeds: Random models, at least 1.
        device: `cpu` or `cuda`; the random numbers are the same.

    Returns:
        A row for each of `HOSTS` and each of `sublayers`: `host`, `block`, `sublayer`, `seeds`;
        `median_` and `max_` over seeds of what `insert_zeros` measures: `shift`, `null_norm`,
        `null_entry`; `max_state`, the largest |entry| of an old token's state over seeds.
    """
    runs = []
    for seed in range(seeds):
        model, h_SE, is_null_T = random_case(blocks, seed)
        for name, host in hosts_of(model.to(device)).items():
            runs.append(insert_zeros(host, h_SE.to(device), is_null_T.to(device)).assign(host=name))
    groups = pd.concat(runs).groupby(["host", "block", "sublayer"], sort=False)
    table = groups.agg(
        seeds=("shift", "size"),
        median_shift=("shift", "median"),
        max_shift=("shift", "max"),
        median_null_norm=("null_norm", "median"),
        max_null_norm=("null_norm", "max"),
        median_null_entry=("null_entry", "median"),
        max_null_entry=("null_entry", "max"),
        max_state=("state", "max"),
    )
    return table.reset_index()


def cells(table: pd.DataFrame) -> Cells:
    """Header and cells of the table for a terminal: narrow, one line a row."""
    columns = {
        "median_shift": "shift",
        "max_shift": "max",
        "median_null_norm": "null norm",
        "max_null_norm": "max",
        "median_null_entry": "entry",
        "max_null_entry": "max",
        "max_state": "state",
    }
    rows = [
        [row["host"], _place(row["block"], row["sublayer"]), *(f"{row[column]:.2g}" for column in columns)]
        for row in table.to_dict("records")
    ]
    return ["host", "after", *columns.values()], rows


def notes(table: pd.DataFrame) -> str:
    """What a reader of the table has to know, and what its rows of the final norm say."""
    final = table[table["sublayer"] == "final norm"].set_index("host")
    oa, o = final.loc["oa-only"], final.loc["otransformer"]
    return (
        "shift: largest change of an old token's entry. null norm, entry: ||h|| and largest entry of the inserted "
        "tokens. state: largest entry of an old token.\n"
        f"At the end, the old tokens of OA-only shift by {oa['median_shift']:.3g} (median), and the inserted ones, "
        f"which should be 0, have entries up to {oa['median_null_entry']:.3g} (median). In OTransformer the old ones "
        f"shift by at most {o['max_shift']:.2g}, and the inserted ones have entries up to {o['max_null_entry']:.2g}. "
        + PAPER
    )


def plot_ablation(table: pd.DataFrame, file: Path) -> None:
    """Draw the inserted tokens' norms and the old tokens' shifts through the sublayers.

    Lines are medians over seeds, bars reach up to the largest. Raises `OSError` if the file cannot be
    written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose

    places = table.loc[table["host"] == HOSTS[0], ["block", "sublayer"]]
    labels = ["input", *(_place(*place) for place in places.itertuples(index=False))]
    figure = Figure(figsize=(min(max(5.2, 1.5 + 0.7 * len(labels)), 30), 5.6), dpi=160, layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, sharey=True)
    for axes, column, title in [
        (upper, "null_norm", "norm of the inserted tokens"),
        (lower, "shift", "shift of the old tokens"),
    ]:
        for i, host in enumerate(HOSTS):
            rows = table[table["host"] == host]
            median, largest = ([0.0, *rows[f"{kind}_{column}"]] for kind in ("median", "max"))
            x = [position + 0.13 * (i - 1) for position in range(len(labels))]
            marker, color, line = _STYLES[host]
            axes.plot(x, median, marker=marker, color=color, linestyle=line, markersize=5, label=host, clip_on=False)
            axes.vlines(x, median, largest, color=color, linewidth=1)
        axes.set_ylabel(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    # Exact zeros lie on the axis; rounding and whatever is larger is drawn logarithmically.
    top = 3 * table[["max_null_norm", "max_shift"]].to_numpy().max()
    lower.set_yscale("symlog", linthresh=_SMALLEST, linscale=0.4)
    lower.set_ylim(0, top)
    lower.set_yticks([0, *(10.0**power for power in range(-8, 40, 2) if 10.0**power < top)])
    lower.set_xticks(range(len(labels)), labels, rotation=90 if len(labels) > 40 else 0)
    lower.set_xlim(-0.5, len(labels) - 0.5)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside upper center", ncols=len(HOSTS), frameon=False)
    with replacing(file) as part:
        figure.savefig(part, format="png")


def _place(block: int, sublayer: str) -> str:
    return {"attention": f"attn {block}", "ffn": f"FFN {block}", "final norm": "norm"}[sublayer]


def _blocks(model: OTransformer) -> list[OTransformerBlock]:
    return list(model.blocks)  # type: ignore[arg-type]
