"""The ablation: hosts and figures against a loop in float64, the bars, and what the command prints and refuses."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.experiments import ablation
from oretrofit.experiments.ablation import HOSTS, WIDTH
from oretrofit.patches.operators import OTransformer

SEEDS = 30
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


# --- The three hosts, token by token, in float64 ---


def norm_loop(x, norm):
    weight, bias = norm
    return [(t - t.mean()) / np.sqrt(t.var() + 1e-5) * weight + bias for t in x]


def gelu(x):
    return np.array([0.5 * t * (1 + math.erf(t / math.sqrt(2))) for t in x])


def states_loop(weights, tokens, host, heads, blocks, tau):
    """States after every attention, FFN and the final norm; `weights(name)` is a matrix and its bias."""

    def presence(h, gated):
        return [(t @ t) / (tau + t @ t) if gated else 1.0 for t in h]

    attention_gated, rest_gated = host != "standard", host == "otransformer"
    h, states = list(tokens), []
    for b in range(blocks):
        x = norm_loop(h, weights(f"blocks.{b}.norm"))
        q, k, v = (
            [w @ t + bias for t in x] for w, bias in (weights(f"blocks.{b}.attention.{n}_projection") for n in "qkv")
        )
        p = presence(h, attention_gated)
        out_weight, _ = weights(f"blocks.{b}.attention.out_projection")
        width = len(h[0]) // heads
        attended = []
        for i in range(len(h)):
            parts = []
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                mass = [p[j] * math.exp(q[i][part] @ k[j][part] / math.sqrt(width)) for j in range(len(h))]
                parts.append(p[i] * sum(m * v[j][part] for j, m in enumerate(mass)) / sum(mass))
            attended.append(h[i] + out_weight @ np.concatenate(parts))
        h = attended
        states.append(np.array(h))

        p = presence(h, rest_gated)
        x = norm_loop(h, weights(f"blocks.{b}.ffn.ffn.0.norm"))
        (w1, b1), (w2, b2) = weights(f"blocks.{b}.ffn.ffn.1"), weights(f"blocks.{b}.ffn.ffn.3")
        h = [t + p_i * (w2 @ gelu(w1 @ (p_i * x_i) + b1) + b2) for t, p_i, x_i in zip(h, p, x, strict=True)]
        states.append(np.array(h))
    p = presence(h, rest_gated)
    states.append(np.array([p_i * x for p_i, x in zip(p, norm_loop(h, weights("norm.norm")), strict=True)]))
    return states


def weights_of(model):
    state = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    return lambda name: (state[f"{name}.weight"], state.get(f"{name}.bias"))


def with_zeros(h, is_null):
    longer = np.zeros((len(is_null), h.shape[1]))
    longer[~is_null] = h
    return longer


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("tau", [1e-6, WIDTH / 3])
def test_hosts_are_their_formulas(host, tau):
    model, h, is_null = ablation.random_case(2, seed=3)
    model = model.double()
    for module in model.modules():
        if hasattr(module, "tau"):
            module.tau = tau
    longer = with_zeros(h.numpy(), is_null.numpy())
    states = ablation.sublayer_states(ablation.hosts_of(model)[host], torch.tensor(longer))
    expected = states_loop(weights_of(model), longer, host, ablation.HEADS, 2, tau)
    assert len(states) == len(expected) == 5
    for state, reference in zip(states, expected, strict=True):
        np.testing.assert_allclose(state.numpy(), reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_zeros_the_three_agree(dtype):
    for seed in range(5):
        model, h, _ = ablation.random_case(2, seed)
        hosts = ablation.hosts_of(model.to(dtype))
        standard, *others = (ablation.sublayer_states(hosts[host], h.to(dtype)) for host in HOSTS)
        # In float64, 1 - p = tau / ||h||^2 is seen: below 1e-7 here.
        tolerance = 1e-5 if dtype == torch.float32 else 1e-6
        for states in others:
            for state, reference in zip(states, standard, strict=True):
                torch.testing.assert_close(state, reference, rtol=0, atol=tolerance * reference.abs().max().item())


def test_hosts_have_the_same_weights_and_leave_the_model_alone():
    model, _, _ = ablation.random_case(2, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hosts = ablation.hosts_of(model)
    assert hosts["otransformer"] is model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    sums = [sorted(p.double().sum().item() for p in host.parameters()) for host in hosts.values()]
    assert sums[0] == sums[1] == sums[2]


def test_random_numbers_are_as_documented():
    model, h, _ = ablation.random_case(8, seed=0)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    scaled = torch.cat([m.weight.flatten() * m.in_features**0.5 for m in linear])
    biases = torch.cat([m.bias for m in [*linear, *norms] if m.bias is not None])
    gains = torch.cat([m.weight for m in norms])
    # Within four standard errors of a mean and of a variance.
    for sample, mean, var in [(scaled, 0, 1), (biases, 0, 0.25), (gains, 1, 1), (h.flatten(), 0, 1)]:
        assert abs(sample.mean() - mean) < 4 * (var / len(sample)) ** 0.5
        assert abs(sample.var() - var) < 4 * var * (2 / len(sample)) ** 0.5
    # One seed for two generators would give tokens and weights the same numbers.
    for sample in (scaled, biases):
        assert abs(np.corrcoef(sample[: h.numel()].detach(), h.flatten()[: len(sample)])[0, 1]) < 0.15


def test_zeros_go_in_at_random_places():
    places = [ablation.random_case(1, seed)[2] for seed in range(200)]
    assert all(place.sum() == ablation.NULLS for place in places)
    expected = 200 * ablation.NULLS / len(places[0])
    counts = torch.stack(places).sum(dim=0)
    assert (abs(counts - expected) < 5 * expected**0.5).all()


# --- What is measured ---


def test_table_is_that_of_the_loop():
    table = ablation.ablate(blocks=1, seeds=3)
    rows = []
    for host in HOSTS:
        runs = []
        for seed in range(3):
            model, h, is_null = ablation.random_case(1, seed)
            weights, h, is_null = weights_of(model), h.numpy(), is_null.numpy()
            without, longer = (
                states_loop(weights, x, host, ablation.HEADS, 1, ablation.TAU)
                for x in (h.astype(float), with_zeros(h, is_null))
            )
            runs.append(
                [
                    (
                        np.abs(b[~is_null] - a).max(),
                        max(math.sqrt(t @ t) for t in b[is_null]),
                        np.abs(b[is_null]).max(),
                        np.abs(b[~is_null]).max(),
                    )
                    for a, b in zip(without, longer, strict=True)
                ]
            )
        for place, figures in zip(
            [(1, "attention"), (1, "ffn"), (1, "final norm")], np.array(runs).swapaxes(0, 1), strict=True
        ):
            (shift, null_norm, null_entry), (*_, max_state) = np.sort(figures, axis=0)[1][:3], figures.max(axis=0)
            largest = figures.max(axis=0)
            rows.append(
                {"host": host, "block": place[0], "sublayer": place[1], "seeds": 3}
                | {"median_shift": shift, "max_shift": largest[0]}
                | {"median_null_norm": null_norm, "max_null_norm": largest[1]}
                | {"median_null_entry": null_entry, "max_null_entry": largest[2], "max_state": max_state}
            )
    pd.testing.assert_frame_equal(table, pd.DataFrame(rows), rtol=1e-5, atol=2e-5)


def test_a_run_is_reproducible_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    table = ablation.ablate(blocks=1, seeds=2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    pd.testing.assert_frame_equal(table, ablation.ablate(blocks=1, seeds=2))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


@pytest.fixture(scope="module", params=DEVICES)
def runs(request):
    """A row a seed, host and sublayer."""
    rows = []
    for seed in range(SEEDS):
        model, h, is_null = (part.to(request.param) for part in ablation.random_case(2, seed))
        for name, host in ablation.hosts_of(model).items():
            rows.append(ablation.insert_zeros(host, h, is_null).assign(host=name, seed=seed))
    return pd.concat(rows)


def of(runs, host):
    return runs[runs["host"] == host]


def test_bars(runs):
    o, oa = of(runs, "otransformer"), of(runs, "oa-only")
    assert (o["shift"] <= 1e-6 * o["state"]).all()
    final = oa[oa["sublayer"] == "final norm"]
    assert final["shift"].median() >= 10_000 * 1e-6 * o["state"].max()
    assert final["shift"].median() > 1
    assert final["null_entry"].median() > 1


def test_where_the_zero_wakes_up(runs):
    assert (of(runs, "otransformer")[["null_norm", "null_entry"]] == 0).all(axis=None)
    oa = of(runs, "oa-only").set_index(["block", "sublayer"])
    assert (oa.loc[(1, "attention"), "null_norm"] == 0).all()
    assert (oa.drop((1, "attention"))["null_norm"] > 1).all()
    # Awake after the first FFN, it moves others at the next attention, and not before.
    first = oa.loc[[(1, "attention"), (1, "ffn")]]
    assert (first["shift"] <= 1e-6 * first["state"]).all()
    assert (oa.drop([(1, "attention"), (1, "ffn")])["shift"] > 1e-2).all()
    standard = of(runs, "standard")
    assert (standard["null_norm"] > 1).all()
    assert (standard["shift"] > 1e-3).all()


def test_in_float64_the_shift_is_rounding_still():
    for seed in range(5):
        model, h, is_null = ablation.random_case(2, seed)
        rows = ablation.insert_zeros(model.double(), h.double(), is_null)
        assert (rows["shift"] <= 2e-15 * rows["state"]).all()
        assert (rows["null_norm"] == 0).all()


def test_torchs_own_initialisation_meets_the_bars_too():
    torch.manual_seed(0)
    shifts, entries = [], []
    for seed in range(SEEDS):
        _, h, is_null = ablation.random_case(1, seed)
        hosts = ablation.hosts_of(OTransformer(WIDTH, ablation.HEADS, 2, ablation.TAU))
        o, oa = (ablation.insert_zeros(hosts[host], h, is_null) for host in ("otransformer", "oa-only"))
        assert (o["shift"] <= 1e-6 * o["state"]).all()
        assert (o["null_norm"] == 0).all()
        shifts.append(oa["shift"].iloc[-1] / o["state"].max())
        entries.append(oa["null_entry"].iloc[-1])
    assert np.median(shifts) > 10_000 * 1e-6
    assert np.median(entries) > 1


@pytest.mark.parametrize(
    ("part", "awake"),
    [
        ("norm of an FFN", []),
        ("FFN", [(1, "ffn"), (2, "attention"), (2, "ffn"), (2, "final norm")]),
        ("final norm", [(2, "final norm")]),
    ],
)
def test_one_ungated_part_is_seen_where_it_is(part, awake):
    """An OTransformer with one part wrong. The gate of an OFFN hides what the norm in it lets through."""
    model, *tokens = ablation.random_case(2, seed=0)
    if part == "norm of an FFN":
        model.blocks[0].ffn.ffn[0] = model.blocks[0].ffn.ffn[0].norm
    elif part == "FFN":
        ffn = model.blocks[0].ffn.ffn
        model.blocks[0].ffn.forward = lambda h: h + ffn(h)
    else:
        model.norm = model.norm.norm
    rows = ablation.insert_zeros(model, *tokens)
    found = rows.loc[rows["null_norm"] > 0, ["block", "sublayer"]]
    assert [tuple(row) for row in found.itertuples(index=False)] == awake


def test_hooks_are_gone_afterwards():
    model, *tokens = ablation.random_case(1, seed=0)
    ablation.insert_zeros(model, *tokens)
    assert not model.blocks[0].ffn._forward_hooks
    assert not model.blocks[0].ffn._forward_pre_hooks


# --- The figure and the command ---


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("blocks", [1, 2, 30])
def test_plot(tmp_path, blocks):
    table = ablation.ablate(blocks=blocks, seeds=1)
    assert len(table) == 3 * (2 * blocks + 1)
    ablation.plot_ablation(table, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def ablate(*arguments):
    terminal = {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=terminal).invoke(cli.app, ["ablate", *map(str, arguments)])


def test_command(tmp_path):
    result = ablate("--seeds", 3, "--device", "cpu", "--json", tmp_path / "t.json", "--plot", tmp_path / "p.png")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "t.json").read_text())
    assert rows == ablation.ablate(blocks=2, seeds=3).to_dict("records")
    names = ["host", "block", "sublayer", "seeds", "median_shift", "max_shift", "median_null_norm", "max_null_norm"]
    assert list(rows[0]) == [*names, "median_null_entry", "max_null_entry", "max_state"]
    assert (tmp_path / "p.png").stat().st_size > 10_000
    # A line a row, at 80 columns.
    lines = result.output.splitlines()
    for row in rows:
        place = {"attention": "attn", "ffn": "FFN", "final norm": "norm"}[row["sublayer"]]
        shift = f"{row['median_shift']:.2g}"
        assert any(line.split()[:2] == [row["host"], place] and shift in line for line in lines)
    final = {row["host"]: row for row in rows if row["sublayer"] == "final norm"}
    text = " ".join(result.output.split())
    assert f"shift by {final['oa-only']['median_shift']:.3g} (median)" in text
    assert f"at most {final['otransformer']['max_shift']:.2g}," in text
    assert "7.98" in text


def test_command_writes_nothing_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ablate("--blocks", 1, "--seeds", 1).exit_code == 0
    assert not list(tmp_path.iterdir())


NO_FOLDER = "No such file or directory; give a file in a folder that can be written to"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "0"], "Error: --blocks must be between 1 and 10000000, not 0"),
        (["--seeds", "-1"], "Error: --seeds must lie between 1 and 10000, not -1"),
        (["--device", "tpu"], "Error: --device: unknown device 'tpu'; there are: auto, cpu, cuda"),
        (["--plot", "plot.pdf"], "Error: --plot writes a .png file, not 'plot.pdf'"),
        (["--plot", "missing/plot.png"], f"Error: --plot missing/plot.png: {NO_FOLDER}"),
        (["--json", "missing/t.json"], f"Error: --json missing/t.json: {NO_FOLDER}"),
    ],
)
def test_bad_input_is_one_message(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablation, "ablate", lambda **_: pytest.fail("ran"))
    result = ablate(*arguments)
    assert result.exit_code == 2
    assert result.output.strip() == message
    assert not list(tmp_path.iterdir())


def test_help_has_an_example():
    result = ablate("--help")
    assert result.exit_code == 0
    assert "Example: oretrofit ablate" in " ".join(result.output.split())
