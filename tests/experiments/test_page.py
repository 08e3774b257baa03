"""The page: sound HTML that needs nothing else, whatever names hold, with the numbers of cases and statistics."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.experiments.page import answers, figures
from oretrofit.experiments.page.build import notices, render
from oretrofit.experiments.page.shown import read_shown
from oretrofit.experiments.page.svg import draw
from oretrofit.experiments.predictions import LEVELS, Answer, make_arrays
from oretrofit.experiments.provenance import FILE
from oretrofit.experiments.runs import CaseResult, open_run
from oretrofit.experiments.statistics import compare_variants, resampled_cases

RESULTS = Path(__file__).parents[2] / "results"
CALIBRATION = {"quantile": 0.01, "tables": 16, "seed": 20_000}
SHIFTS = {"identity": 1e-6, "oa": 0.01}
ROWS = 25


def settings(datasets: list[str], **changes: Any) -> dict[str, Any]:
    made = {
        "host": {"name": "tiny", "sha256": "a" * 64},
        "variants": {
            "identity": {"patch": "full-o", "delta": 1e-6, **CALIBRATION},
            "oa": {"patch": "oa", "delta": 1e-3, **CALIBRATION},
        },
        "datasets": datasets,
        "files_sha256": {spec: "f" * 64 for spec in datasets if spec.startswith("csv:")},
        "seeds": [0, 1],
        "max_train_rows": 50,
        "max_test_rows": 25,
        "precision": "float32",
        "precision_used": "float32",
        "device": "cpu",
        "gpu": None,
        "versions": {"oretrofit": "0.1.0", "torch": "2.13.0"},
    }
    return made | changes


def answered(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Answer]]:
    """Test targets, and what host and variants predict of them."""
    mean = rng.normal(size=ROWS)
    spread = np.linspace(-1.5, 1.5, len(LEVELS))
    shifts = {"host": np.zeros(ROWS)} | {name: size * rng.normal(size=ROWS) for name, size in SHIFTS.items()}
    found = {
        name: Answer((mean + s).astype("f4"), (mean[:, None] + s[:, None] + spread).astype("f4"))
        for name, s in shifts.items()
    }
    return (mean + 0.5 * rng.normal(size=ROWS)).astype("f4"), found


def record(dataset: str, seed: int, variant: str, y: np.ndarray, found: dict[str, Answer]) -> dict[str, Any]:
    made: dict[str, Any] = {"dataset": dataset, "seed": seed, "variant": variant}
    made |= {"n_train": 50, "n_test": ROWS, "n_columns": 3, "precision": "float32", "device": "cpu", "workers": 1}
    for who, name in (("host", "host"), ("variant", variant)):
        mean, quantiles = found[name].mean.astype(float), found[name].quantiles
        made[f"{who}_rmse"] = float(np.sqrt(np.mean((mean - y) ** 2)))
        made[f"{who}_nll"] = 1.0 + float(mean.mean())
        made[f"{who}_crps"] = 0.3 + 0.01 * float(mean.mean())
        for share, low, high in ((80, 3, -4), (95, 1, -2)):
            inside = (quantiles[:, low] <= y) & (y <= quantiles[:, high])
            made[f"{who}_coverage_{share}"] = float(inside.mean())
        made |= {f"{who}_seconds": 1.0 + seed, f"{who}_peak_mb": 100.0}
    made["rmse_delta_pct"] = 100 * (made["variant_rmse"] / made["host_rmse"] - 1)
    shift = found[variant].mean.astype(float) - found["host"].mean
    made |= {"max_abs_diff_sd": float(np.abs(shift).max()), "train_mean_rmse": 1.2, "target_sd": float(y.std())}
    return made


def make_run(folder: Path, datasets: list[str], seed: int = 0, **changes: Any) -> Path:
    """A finished run, of numbers that a generator drew."""
    rng = np.random.default_rng(seed)
    with open_run(folder, settings(datasets, **changes)) as run:
        for dataset in datasets:
            for split in (0, 1):
                y, found = answered(rng)
                records = [record(dataset, split, variant, y, found) for variant in SHIFTS]
                arrays = {variant: make_arrays(y, found["host"], found[variant]) for variant in SHIFTS}
                run.append(CaseResult(dataset, split, records, arrays))
        for variant in SHIFTS:
            run.retrofit_file(variant).write_text(json.dumps(retrofit(variant)))
    return folder


def retrofit(variant: str) -> dict[str, Any]:
    names = ["out_norm", "blocks.0.norm_q", "blocks.0.norm_kv", "blocks.1.norm_q"]
    figures = dict.fromkeys(("sq_norm_q01", "sq_norm_q50", "sq_norm_q99"), 2.5)
    taus = {name: 0.001234567 * (i + 1) for i, name in enumerate(names)}
    return {
        "format": "oretrofit-1",
        "variant": variant,
        "tau": taus,
        "calibration": {"delta": 1e-3},
        "statistics": {name: {**figures, "presence_min": 0.998, "presence_median": 0.9995} for name in names},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one", ["ames", "cars", "openml:5"])


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return render(read_shown([folder]))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, which take the most time."""
    monkeypatch.setattr(figures, "draw", lambda name, title, *_, **__: f'<svg id="{name}" role="img"></svg>')


VOID = {"meta", "link", "br", "img", "hr", "input"}


class Parsed(HTMLParser):
    """Elements as (tag, attributes, text), with their nesting checked."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[tuple[str, dict[str, Any], list[str]]] = []
        self.found: list[tuple[str, dict[str, Any], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        element: tuple[str, dict[str, Any], list[str]] = (tag, dict(attrs), [])
        self.found.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self.open:
            texts.append(data)

    def all(self, *tags: str) -> list[tuple[dict[str, Any], str]]:
        return [(attributes, "".join(texts)) for tag, attributes, texts in self.found if tag in tags]


def tables(text: str) -> dict[str, pd.DataFrame]:
    """The page's tables by caption: texts, and beside each column NAME, as NAME*, the numbers behind it."""
    made = {}
    for part in re.findall(r"<table.*?</table>", text, re.DOTALL):
        parsed = Parsed(part)
        names = [name for attributes, name in parsed.all("th") if attributes.get("scope") == "col"]
        rows: list[dict[str, Any]] = []
        cells = [cell for cell in parsed.all("th", "td") if cell[0].get("scope") != "col"]
        for i in range(0, len(cells), len(names)):
            row: dict[str, Any] = {}
            for name, (attributes, shown) in zip(names, cells[i : i + len(names)], strict=True):
                row[name], row[f"{name}*"] = shown, attributes.get("data-value", shown)
            rows.append(row)
        made[parsed.all("caption")[0][1]] = pd.DataFrame(rows)
    return made


def rows_of(folder: Path) -> pd.DataFrame:
    lines = (folder / "cases.jsonl").read_text().splitlines()
    return pd.DataFrame([record for line in lines for record in json.loads(line)["variants"]])


# ---- A page that stands alone --------------------------------------------------------------------


def check_sound(text: str) -> Parsed:
    parsed = Parsed(text)
    assert text.startswith("<!doctype html>")
    ids = [attributes["id"] for _, attributes, _ in parsed.found if "id" in attributes]
    assert max(Counter(ids).values()) == 1
    for _, attributes, _ in parsed.found:
        for name, value in attributes.items():
            if name in ("href", "src", "xlink:href"):
                assert value.startswith(("#", "data:")), value
                assert not value.startswith("#") or value[1:] in ids
            for target in re.findall(r"url\((.*?)\)", value or ""):
                assert target.startswith("#") and target[1:] in ids
            assert not name.startswith("on")
    (style,) = (text for _, text in parsed.all("style"))
    assert "url(" not in style and "@import" not in style
    ((_, script),) = parsed.all("script")
    assert script.strip() == (Path(answers.__file__).parent / "page.js").read_text().strip()
    assert not re.search("https?:|//cdn|fetch|XMLHttp", text)
    return parsed


def test_it_is_sound_and_needs_nothing_else(page: str) -> None:
    parsed = check_sound(page)
    assert [text for _, text in parsed.all("h1")] == ["one"]
    headings = ["Headline", "Table by table", "Cases", "Predictions", "Reliability of the quantiles", "Sites"]
    assert [text for _, text in parsed.all("h2")] == [*headings, "Cost", "Provenance"]
    for attributes, _ in parsed.all("svg"):
        assert attributes["role"] == "img" and attributes["aria-label"]
    assert len(parsed.all("svg")) == 2 + 2 + 2 + 2  # forests, predictions, quantiles, sites
    assert all(attributes["scope"] in ("row", "col") for attributes, _ in parsed.all("th"))


def test_every_colour_is_there_in_both_modes(page: str) -> None:
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    blocks = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    names = [set(re.findall(r"--([\w-]+): #", block)) for block in blocks]
    assert len(names) == 4 and names[0] == names[1] and names[2] == names[3]  # light and dark, of figures and page
    assert {"ink", "line", "oa", "identity"} <= used <= names[0] | names[2]
    assert not re.search(r"(fill|stroke): #", page)  # no figure has a colour of its own


def test_the_same_run_is_the_same_page(folder: Path, page: str) -> None:
    assert render(read_shown([folder])) == page
    code = (
        "import hashlib, sys; from pathlib import Path; from oretrofit.experiments.page import build, shown;"
        "page = build.render(shown.read_shown([Path(sys.argv[1])]));"
        "print(hashlib.sha256(page.encode()).hexdigest(), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    found = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [hashlib.sha256(page.encode()).hexdigest(), "False"]


EVIL = 'csv:<script>alert(1) a"\'><img src=x onerror=alert(2)>&amp;$x_1$ id="b" #000001 {{ 7 * 7 }}.csv#y'


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    datasets = [EVIL, "csv:a\n\x01.csv#y", "csv:" + "long" * 40 + ".csv#y", "csv:表 données.csv#y"]
    made = make_run(tmp_path / "<b>run&", datasets, host={"name": "<i>host", "sha256": "<u>" + "a" * 61})
    noted = {"command": "oretrofit eval --suite '<script>alert(3)</script>' \udcff", "revision": "<s>abc"}
    (made / FILE).write_text(json.dumps(noted) + "\n")
    text = render(read_shown([made]))
    text.encode("utf-8")
    parsed = check_sound(text)
    tags = {tag for tag, _, _ in parsed.found}
    assert not tags & {"img", "i", "u", "s"}
    assert [text for _, text in parsed.all("h1")] == ["<b>run&"]
    assert "alert(3)" in text and "\\udcff" in text and "{{ 7 * 7 }}" in text and "49.csv" not in text
    shown = set(tables(text)["Cases"]["table"])
    assert EVIL.removeprefix("csv:") in shown
    assert any("a\\n\\x01" in name for name in shown)


def test_figures_keep_the_letters_and_ids_of_text_apart() -> None:
    label = 'a id="x" url(#y) #000001 $z$ <b>& 0.123456'

    def plot(figure: Figure) -> None:
        figure.add_subplot().set_xlabel(label)

    found = draw("fig-1", "<title>", 100, plot)
    parsed = Parsed(found)
    assert label in [text for _, text in parsed.all("text")]
    assert parsed.all("svg")[0][0]["aria-label"] == "<title>"
    assert all(attributes["id"].startswith("fig-1-") for _, attributes, _ in parsed.found if "id" in attributes)


# ---- Its numbers ---------------------------------------------------------------------------------


def test_the_cases_are_those_of_the_run(folder: Path, page: str) -> None:
    shown, rows = tables(page)["Cases"], rows_of(folder)
    assert list(shown["table"]) == list(rows["dataset"]) and list(shown["variant"]) == list(rows["variant"])
    for name, column in (
        ("RMSE change, %", "rmse_delta_pct"),
        ("RMSE, host", "host_rmse"),
        ("RMSE, variant", "variant_rmse"),
        ("CRPS, host", "host_crps"),
        ("in 80 % interval, variant", "variant_coverage_80"),
        ("largest shift, SD", "max_abs_diff_sd"),
        ("seconds, host", "host_seconds"),
    ):
        assert list(shown[f"{name}*"].astype(float)) == list(rows[column]), name
    np.testing.assert_allclose(shown["NLL change*"].astype(float), rows["variant_nll"] - rows["host_nll"], rtol=1e-12)
    crps = 100 * (rows["variant_crps"] - rows["host_crps"]) / rows["host_crps"]
    np.testing.assert_allclose(shown["CRPS change, %*"].astype(float), crps, rtol=1e-9, atol=1e-13)  # 100 eps
    assert shown["RMSE change, %"][1] == f"{rows['rmse_delta_pct'][1]:+.4f}"


def test_the_csv_has_all_of_them_unrounded(folder: Path, page: str) -> None:
    (link,) = (attributes["href"] for attributes, _ in Parsed(page).all("a") if "download" in attributes)
    assert link.startswith("data:text/csv;charset=utf-8;base64,")
    found = list(csv.DictReader(io.StringIO(base64.b64decode(link.partition(",")[2]).decode())))
    expected = rows_of(folder).to_dict("records")
    assert [set(row) for row in found] == [set(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert {name: type(wanted[name])(text) for name, text in row.items()} == wanted


def test_the_headline_is_that_of_the_statistics(folder: Path, page: str) -> None:
    rows = rows_of(folder)
    shown = tables(page)
    headline = shown["Change of the test RMSE against the host"].set_index("variant")
    for variant, group in rows.groupby("variant"):
        assert float(headline.loc[variant, "mean change, %*"]) == pytest.approx(group["rmse_delta_pct"].mean())
        largest = group["rmse_delta_pct"].iloc[group["rmse_delta_pct"].abs().argmax()]
        assert float(headline.loc[variant, "largest, %*"]) == largest
        wins = (group["variant_rmse"] < group["host_rmse"]).sum()
        assert (
            headline.loc[variant, "wins : losses"] == f"{wins} : {(group['variant_rmse'] > group['host_rmse']).sum()}"
        )
        assert (headline.loc[variant, "cases"], headline.loc[variant, "tables"]) == ("6", "3")
    statistics = compare_variants(rows)
    assert list(shown["All measures"]["mean*"].astype(float)) == list(statistics["mean"])
    holm = statistics["equivalence_p_holm"].dropna()
    assert list(shown["All measures"].loc[holm.index, "p (Holm)*"].astype(float)) == list(holm)
    verdict = headline.loc["oa", "equivalent?"]
    tested = statistics[(statistics["variant"] == "oa") & (statistics["measure"] == "rmse")].iloc[0]
    assert verdict.startswith("yes, within ±0.5 %" if tested["equivalent"] else "not shown within ±0.5 %")


def test_predictions_and_quantiles_by_a_loop(folder: Path) -> None:
    (shown,) = read_shown([folder])
    found = shown.answers
    means, shifts, below, changes = [], [], [], []
    for case in shown.run.results():
        kept = shown.run.predictions(case.dataset, case.seed)
        assert kept is not None
        y, host, oa = kept.y.astype(float), kept.answers["host"], kept.answers["oa"]
        for row in range(len(y)):
            means.append((float(host.mean[row]) - y.mean()) / y.std())
            shifts.append((float(oa.mean[row]) - float(host.mean[row])) / y.std())
        shares = [
            [sum(kept.y[r] <= answer.quantiles[r, i] for r in range(len(y))) / len(y) for i in range(len(LEVELS))]
            for answer in (host, oa)
        ]
        below.append(shares[1])
        changes.append(np.subtract(shares[1], shares[0]))
    np.testing.assert_allclose(found.agreement("oa"), [means, shifts], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.levels, LEVELS, rtol=1e-6)
    np.testing.assert_allclose(found.reliability(["identity", "oa"])["oa"], np.mean(below, axis=0))
    mean, low, high = found.reliability_change("oa")
    np.testing.assert_allclose(mean, np.mean(changes, axis=0), atol=1e-15)
    datasets = np.array([case.dataset for case in shown.run.results()])
    drawn = np.array([np.mean([changes[i] for i in one if i >= 0], axis=0) for one in resampled_cases(datasets, 2000)])
    np.testing.assert_allclose([low, high], np.quantile(drawn, [0.025, 0.975], axis=0), atol=1e-12)


def test_sites_are_those_of_the_retrofits(page: str) -> None:
    shown = tables(page)["Sites of oa"]
    # The stage of several parts is in front of the readout, which the model has first.
    assert list(zip(shown["stage"], shown["site"], strict=True)) == [
        *(("blocks", site) for site in ("0.norm_q", "0.norm_kv", "1.norm_q")),
        ("out_norm", "out_norm"),
    ]
    expected = [0.001234567 * i for i in (2, 3, 4, 1)]
    assert list(shown["tau*"].astype(float)) == expected
    assert set(shown["presence, lowest"]) == {"0.998"} and set(shown["||h||², 50 %"]) == {"2.5"}


def test_provenance_says_what_was_noted(tmp_path: Path, folder: Path, quick: None) -> None:
    (shown,) = read_shown([folder])
    text = render([shown])
    found = tables(text)["Provenance"].set_index("setting")["one"]
    assert found["host's weights, SHA-256"] == "a" * 64 and found["version of torch"] == "2.13.0"
    assert found["command"] == "not noted by the version that ran it"
    sha256 = hashlib.sha256((folder / "cases.jsonl").read_bytes()).hexdigest()
    assert found["cases.jsonl, SHA-256"] == sha256


# ---- Several runs, and runs that lack something --------------------------------------------------


def test_two_runs_side_by_side(tmp_path: Path, folder: Path) -> None:
    gpu = {"precision": "auto", "precision_used": "autocast", "device": "cuda", "gpu": "a GPU"}
    other = make_run(tmp_path / "two", ["cars", "openml:5", "diamonds"], seed=1, **gpu)
    text = render(read_shown([folder, other]))
    parsed = check_sound(text)
    assert [text for _, text in parsed.all("h1")] == ["one beside two"]
    shown = tables(text)
    headline = shown["Change of the test RMSE against the host"]
    assert list(zip(headline["variant"], headline["run"], strict=True)) == [
        *(("identity", "one"), ("identity", "two")),
        *(("oa", "one"), ("oa", "two")),
    ]
    hosts = shown["The hosts, unpatched, on the cases that all runs have"]
    assert list(hosts["in all runs"]) == ["4", "4"] and list(hosts["device"]) == ["cpu", "a GPU"]
    for name, run in (("one", folder), ("two", other)):
        rows = rows_of(run)
        common = rows[rows["dataset"].isin(["cars", "openml:5"]) & (rows["variant"] == "oa")]
        mean = float(hosts.loc[hosts["run"] == name, "RMSE / that of the train mean*"].iloc[0])
        assert mean == pytest.approx((common["host_rmse"] / 1.2).mean())
    differing = {text for attributes, text in parsed.all("td") if attributes.get("class") == "differs"}
    assert {"float32", "auto (autocast)", "cpu", "a GPU"} <= differing and "a" * 64 not in differing
    # One retrofit for both: its sites are shown once.
    assert "Sites of oa" in shown and text.count("oa in one, two: 4 sites") == 1
    cases = shown["Cases"]
    assert len(cases) == 24 and list(cases["run"][:2]) == ["one", "one"]
    at = cases[(cases["table"] == "cars") & (cases["seed"] == "0")]
    assert list(zip(at["variant"], at["run"], strict=True)) == [
        (variant, run) for variant in ("identity", "oa") for run in ("one", "two")
    ]


def test_runs_of_one_name_are_told_apart(tmp_path: Path, quick: None) -> None:
    folders = [make_run(tmp_path / parent / "run", ["ames"]) for parent in ("a", "b")]
    assert [shown.name for shown in read_shown(folders)] == ["a/run", "b/run"]


@pytest.mark.parametrize("name", ["eval-float32", "eval-auto", "eval-closed"])
def test_committed_runs(name: str, quick: None) -> None:
    runs = read_shown([RESULTS / name])
    text = render(runs)
    parsed = check_sound(text)
    headings = [text for _, text in parsed.all("h2")]
    has_predictions = (RESULTS / name / "predictions").exists()
    assert ("Predictions" in headings) == ("Reliability of the quantiles" in headings) == has_predictions
    assert ("holds no predictions" in " ".join(notices(runs))) != has_predictions
    for variant in runs[0].variants:
        assert f"Sites of {variant}" in tables(text)
    summary = json.loads((RESULTS / name / "summary.json").read_text())
    shown = tables(text)["Change of the test RMSE against the host"].set_index("variant")
    for variant, found in summary["variants"].items():
        assert float(shown.loc[variant, "mean change, %*"]) == pytest.approx(found["mean_rmse_delta_pct"], rel=1e-12)
    paper = {"oa": "+0.088", "full-o": "+0.177"}
    if paper.keys() & summary["variants"].keys():
        assert {v: shown.loc[v, "paper's mean*, %"] for v in paper if v in shown.index} == paper
    else:
        assert "paper's mean*, %" not in shown


def test_the_papers_figures_stand_elsewhere_on_request_only(folder: Path, quick: None) -> None:
    assert "paper's" not in html.unescape(render(read_shown([folder])))
    text = render(read_shown([folder], wants_paper=True))
    assert list(tables(text)["Change of the test RMSE against the host"]["paper's mean*, %"]) == ["–", "+0.088"]
    assert "another host on other data" in text


def test_what_old_runs_lack_is_said(tmp_path: Path, quick: None) -> None:
    made = make_run(tmp_path / "old", ["ames", "cars"])
    lines = [json.loads(line) for line in (made / "cases.jsonl").read_text().splitlines()]
    for line in lines:
        for found in line["variants"]:
            for name in [name for name in found if re.search("crps|coverage|train_mean|target_sd|workers", name)]:
                del found[name]
    (made / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file in [*(made / "predictions").iterdir(), *made.glob("retrofit-*.json")]:
        file.unlink()
    runs = read_shown([made])
    text = render(runs)
    check_sound(text)
    assert [" kept neither CRPS" in notice for notice in notices(runs)] == [True, False]
    assert "holds no predictions" in notices(runs)[1] and all(notice in text for notice in notices(runs)[:1])
    shown = tables(text)
    assert not [name for name in shown["Cases"] if "CRPS" in name or "interval" in name]
    assert set(shown["All measures"]["change of"]) == {"RMSE, %", "NLL, nats"}
    assert text.count("no sites are shown, as the run") == 2


def test_an_unfinished_run_says_what_is_missing(tmp_path: Path, quick: None) -> None:
    made = make_run(tmp_path / "run", ["ames", "cars"])
    lines = (made / "cases.jsonl").read_text().splitlines(keepends=True)
    (made / "cases.jsonl").write_text("".join(lines[:-1]))
    failed = [{"dataset": "cars", "seed": 1, "reason": "ValueError: no", "may_pass": False}]
    (made / "summary.json").write_text(json.dumps({"failed": failed, "margin": 0.25}))
    runs = read_shown([made])
    assert notices(runs) == ["1 of 4 cases have no result, and no figure counts them: cars seed 1 (ValueError: no)."]
    assert "within ±0.25 %" in render(runs)


def test_predictions_that_cannot_be_read_are_named(tmp_path: Path, quick: None) -> None:
    made = make_run(tmp_path / "run", ["ames", "cars"])
    file = sorted((made / "predictions").glob("ames-0-oa-*"))[0]
    file.write_bytes(b"no archive")
    (next(iter(made.glob("retrofit-oa-*")))).write_text("{")
    runs = read_shown([made])
    text = render(runs)
    assert "predictions are kept for 3 of 4 cases only." in notices(runs)
    assert any(f"predictions/{file.name} holds no predictions" in notice for notice in notices(runs))
    assert str(tmp_path) not in text
    assert "cannot be read as a retrofit (JSONDecodeError" in text


def test_times_of_cases_side_by_side_are_left_out(tmp_path: Path, quick: None) -> None:
    made = make_run(tmp_path / "run", ["ames", "cars"])
    (made / "cases.jsonl").write_text((made / "cases.jsonl").read_text().replace('"workers": 1', '"workers": 2'))
    text = render(read_shown([made]))
    assert "seconds, host" not in tables(text)["Cases"]
    assert set(tables(text)["Time of fit and predict, and peak memory"]["time / host's, median"]) == {"–"}


@pytest.mark.parametrize("datasets", [["ames"], [f"openml:{i}" for i in range(40)]])
def test_any_number_of_tables(tmp_path: Path, datasets: list[str]) -> None:
    text = render(read_shown([make_run(tmp_path / "run", datasets)]))
    check_sound(text)
    assert len(text) < 3_000_000
    if len(datasets) == 1:
        assert "not tested" in text


def test_changes_of_all_sizes(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", ["ames", "cars"])
    lines = [json.loads(line) for line in (made / "cases.jsonl").read_text().splitlines()]
    for line, change in zip(lines, (1e-4, -2e-4, 3e-4, 900.0), strict=True):
        line["variants"][1]["rmse_delta_pct"] = change
    (made / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "logarithmic beyond" in render(read_shown([made]))
    for line in lines:
        for found in line["variants"]:
            found["rmse_delta_pct"] = 0.0
    (made / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_sound(render(read_shown([made])))


# ---- The command ---------------------------------------------------------------------------------


def report(*words: str | Path):
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["report", *map(str, words)])


def test_the_command_writes_the_page(tmp_path: Path, folder: Path, page: str) -> None:
    found = report(folder, "--out", tmp_path / "a.html")
    assert found.exit_code == 0, found.output
    assert found.stdout == f"Saved to {tmp_path / 'a.html'}.\n"
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page
    found = report(folder, "--paper", "--out", folder / "report.html")  # beside what is read
    assert found.exit_code == 0, found.output
    assert "paper" in (folder / "report.html").read_text()
    (folder / "report.html").unlink()


def test_bad_input_is_one_message(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "settings.json").write_text(json.dumps(settings(["ames"])))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "settings.json").write_text("{")
    only = copy.deepcopy(settings(["ames"])["variants"])
    only["closed"] = only.pop("oa") | {"patch": "closed"}
    closed = tmp_path / "closed"
    with open_run(closed, settings(["ames"], variants=only)) as run:
        rng = np.random.default_rng(0)
        y, found = answered(rng)
        found["closed"] = found["oa"]
        run.append(CaseResult("ames", 0, [record("ames", 0, variant, y, found) for variant in only]))
    out = tmp_path / "out.html"
    for words, message in (
        ([tmp_path / "gone"], "gone does not exist; give the folder of a run"),
        ([tmp_path / "file"], "file is a file; give the folder of a run"),
        ([tmp_path / "nothing"], "nothing holds no run: it has no settings.json"),
        ([tmp_path / "broken"], "settings.json is no run's settings (not JSON"),
        ([tmp_path / "empty"], "empty holds no finished case; run its eval again"),
        ([folder, folder], "is given twice"),
        ([folder, closed], "one has no variant in common with another run but the control (one has identity, oa; "),
    ):
        result = report(*words, "--out", out)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.startswith("Error: ") and message in result.stderr
        assert not out.exists()
    before = (folder / "cases.jsonl").read_bytes()
    result = report(folder, "--out", folder / "cases.jsonl")
    assert result.exit_code == 2 and "would overwrite what is read" in result.stderr
    assert (folder / "cases.jsonl").read_bytes() == before
    assert report("--out", out).exit_code == report(folder).exit_code == 2
