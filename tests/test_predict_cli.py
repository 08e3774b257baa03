"""`oretrofit predict`: files in, files out, and what it refuses."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.experiments.pretrain import save_host
from oretrofit.retrofit import api
from oretrofit.retrofit.ragged import predicting, preparing

regressor = functools.partial(TabPFNRegressor, n_estimators=2, inference_precision=torch.float32)

SIZES = {"north": 9, "south": 14, "west": 6}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members instead of TabPFN's eight, and float32: in half precision answers depend on the batch."""
    for module in (predicting, preparing):
        monkeypatch.setattr(module, "TabPFNRegressor", regressor)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_host) -> Path:
    """A folder with a host, retrofits and tables, good and bad."""
    folder = tmp_path_factory.mktemp("predict")
    save_host(tiny_host.model, folder / "tiny-v3.safetensors")
    api.patch(folder / "tiny-v3.safetensors", "closed", tau=1e-3).save(folder / "closed.json")
    api.patch(folder / "tiny-v3.safetensors", "oa", tau=1e-3).save(folder / "oa.json")

    rng = np.random.default_rng(0)
    parts = []
    for group, n in SIZES.items():
        part = pd.DataFrame({"x1": rng.standard_normal(n + 3), "x2": rng.standard_normal(n + 3), "shop": group})
        part["kind"] = rng.choice(["a", "b"], n + 3)
        part["y"] = 10 * part["x1"] + rng.standard_normal(n + 3)
        part["known"] = np.arange(n + 3) < n
        parts.append(part)
    rows = pd.concat(parts).sample(frac=1, random_state=0)  # groups are mixed
    train = rows[rows["known"]].drop(columns="known")
    test = rows[~rows["known"]].drop(columns=["known", "y"])
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    train.reset_index(drop=True).to_parquet(folder / "train.parquet")
    test.set_index(pd.Index(range(100, 100 + len(test)), name="row")).to_parquet(folder / "test.parquet")

    test.drop(columns="x2").to_csv(folder / "narrow.csv", index=False)
    test.assign(x3=1).to_csv(folder / "wide.csv", index=False)
    test.head(0).to_csv(folder / "no-rows.csv", index=False)
    train.assign(y="high").to_csv(folder / "text.csv", index=False)
    train.assign(y=train["y"].astype(str).where(train["shop"] != "south", "high")).to_csv(
        folder / "word.csv", index=False
    )
    train.assign(y=train["y"].mask(train["shop"] == "south")).to_csv(folder / "gap.csv", index=False)
    train.assign(shop=range(len(train))).to_csv(folder / "unique.csv", index=False)
    train[train["shop"] != "west"].to_csv(folder / "no-west.csv", index=False)
    train[["y"]].to_csv(folder / "only-y.csv", index=False)
    train.head(1).to_csv(folder / "one-row.csv", index=False)
    for name, table, kinds in (("train", train, ["1", "2", "A"]), ("test", test, ["1", None, "2"])):
        kind = np.resize(np.array(kinds, dtype=object), len(table))
        table.assign(shop=table["shop"].replace("west", "NA"), kind=kind).to_csv(folder / f"{name}-NA.csv", index=False)
    train.assign(shop=[[name] for name in train["shop"]]).to_parquet(folder / "lists.parquet")
    (folder / "empty.csv").write_text("")
    (folder / "broken.parquet").write_text("no parquet")
    (folder / "table.txt").write_text("x,y\n1,2\n")
    return folder


@pytest.fixture(autouse=True)
def in_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def predict(command: str, out: Path | str):
    defaults = {"--train": "train.csv", "--test": "test.csv", "--target": "y", "--retrofit": "closed.json"}
    words = command.split()
    given = [word for pair in defaults.items() if pair[0] not in words for word in pair]
    return CliRunner(env={"COLUMNS": "80"}).invoke(
        cli.app, ["predict", *words, *given, "--device", "cpu", "--precision", "float32", "--out", str(out)]
    )


def one_by_one(quantiles: list[float]) -> pd.DataFrame:
    """Each group fitted and predicted by TabPFN itself, in the order of the test rows."""
    train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
    specs = api.load("closed.json").specs
    answers = []
    for group, rows in test.groupby("shop"):
        own = train[train["shop"] == group]
        fitted = regressor(model_path=specs, device="cpu").fit(own[["x1", "x2", "kind"]], own["y"])
        full = fitted.predict(rows[["x1", "x2", "kind"]], output_type="main", quantiles=quantiles)
        columns = dict(zip((f"q{q:g}" for q in quantiles), full["quantiles"], strict=True))
        answers.append(pd.DataFrame({"shop": group, "prediction": full["mean"], **columns}, index=rows.index))
    return pd.concat(answers).sort_index()


def test_groups_are_predicted_as_if_alone(tmp_path: Path) -> None:
    result = predict("--by shop --quantiles 0.25,0.75", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    assert "Tables: 3; forward passes: " in result.stdout and "6 ensemble members" in result.stdout
    found = pd.read_csv(tmp_path / "p.csv")
    expected = one_by_one([0.25, 0.75])
    assert found["prediction"].std() > 0.1  # rows are told apart
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-4)  # y has a standard deviation of 10


def test_parquet_keeps_the_index(tmp_path: Path) -> None:
    out = tmp_path / "p.parquet"
    out.write_text("overwritten")
    result = predict("--train train.parquet --test test.parquet --by shop", out)
    assert result.exit_code == 0, result.output
    found = pd.read_parquet(out)
    assert list(found.index) == list(range(100, 109)) and found.index.name == "row"
    np.testing.assert_allclose(found["prediction"], one_by_one([])["prediction"], atol=1e-4)
    assert list(found.columns) == ["shop", "prediction"]

    result = predict("--train train.parquet --test test.parquet --by shop", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    assert list(pd.read_csv(tmp_path / "p.csv")["row"]) == list(range(100, 109))


def test_names_and_text_are_not_taken_for_something_else(tmp_path: Path) -> None:
    """A group may be called NA; and a column of text is text in the other file too, though all looks like numbers."""
    result = predict("--train train-NA.csv --test test-NA.csv --by shop", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    found = pd.read_csv(tmp_path / "p.csv", keep_default_na=False)
    train, test = (pd.read_csv(f"{name}-NA.csv", dtype=str, keep_default_na=False) for name in ("train", "test"))
    assert list(found["shop"]) == list(test["shop"]) and "NA" in set(test["shop"])
    numbers = {"x1": float, "x2": float}
    own, rows = train[train["shop"] == "NA"].astype(numbers), test[test["shop"] == "NA"].astype(numbers)
    kind = rows["kind"].where(rows["kind"] != "", None)
    fitted = regressor(model_path=api.load("closed.json").specs, device="cpu")
    fitted.fit(own[["x1", "x2", "kind"]], own["y"].astype(float))
    expected = fitted.predict(rows[["x1", "x2"]].assign(kind=kind))
    np.testing.assert_allclose(found["prediction"][rows.index], expected, atol=1e-4)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_dates(tmp_path: Path, suffix: str) -> None:
    tables = {}
    for name in ("train", "test"):
        tables[name] = pd.read_csv(f"{name}.csv")
        tables[name]["day"] = pd.date_range("2024-01-31", periods=len(tables[name]), freq="17D")
        write = tables[name].to_csv if suffix == "csv" else tables[name].to_parquet
        write(tmp_path / f"{name}.{suffix}", index=False)
    files = " ".join(f"--{name} {tmp_path}/{name}.{suffix}" for name in tables)
    result = predict(files, tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    fitted = regressor(
        model_path=api.load("closed.json").specs, device="cpu", inference_config={"TRANSFORM_DATES": True}
    )
    expected = fitted.fit(tables["train"].drop(columns="y"), tables["train"]["y"]).predict(tables["test"])
    np.testing.assert_allclose(pd.read_csv(tmp_path / "p.csv")["prediction"], expected, atol=1e-4)


def test_without_by_it_is_one_table(tmp_path: Path) -> None:
    result = predict("--quantiles 0.5", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
    fitted = regressor(model_path=api.load("closed.json").specs, device="cpu").fit(train.drop(columns="y"), train["y"])
    found = pd.read_csv(tmp_path / "p.csv")
    assert list(found.columns) == ["prediction", "q0.5"]
    np.testing.assert_allclose(found["prediction"], fitted.predict(test[["x1", "x2", "shop", "kind"]]), atol=1e-4)


def test_calibrates_a_closed_retrofit_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def patch(*args, **settings):
        made.append(args)
        return api.patch(*args, tau=1e-3, **settings)

    monkeypatch.setattr("oretrofit.patch", patch, raising=False)
    command = "predict --train train.csv --test test.csv --target y --by shop --host tiny-v3.safetensors --device cpu"
    command += " --precision float32"
    result = CliRunner().invoke(cli.app, [*command.split(), "--out", str(tmp_path / "p.csv")])
    assert result.exit_code == 0, result.output
    assert made == [("tiny-v3.safetensors", "closed")]
    np.testing.assert_allclose(pd.read_csv(tmp_path / "p.csv")["prediction"], one_by_one([])["prediction"], atol=1e-4)


@pytest.mark.parametrize(
    ("command", "group", "message"),
    [
        ("--train gap.csv", "south", "No prediction for group 'south': Input y contains NaN"),
        ("--train word.csv", "south", "No prediction for group 'south': Input y contains NaN"),
        ("--train no-west.csv", "west", "No prediction for group 'west': train rows: 0; at least 2 are needed"),
    ],
)
def test_a_bad_group_does_not_cost_the_others(command: str, group: str, message: str, tmp_path: Path) -> None:
    result = predict(f"{command} --by shop --on-error skip", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    assert message in result.stderr and "3 of 9 rows have no prediction." in result.stderr
    found, expected = pd.read_csv(tmp_path / "p.csv"), one_by_one([])
    assert (found["prediction"].isna() == (found["shop"] == group)).all()
    good = found["shop"] != group
    np.testing.assert_allclose(found["prediction"][good], expected["prediction"][good], atol=1e-4)


def test_pooled(tmp_path: Path) -> None:
    result = predict("--train no-west.csv --by shop --too-few pooled", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    found = pd.read_csv(tmp_path / "p.csv")
    assert found["prediction"].notna().all()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--test narrow.csv --by shop", "test lacks columns that train has: ['x2']"),
        ("--test narrow.csv", "test lacks columns that train has: ['x2']"),
        ("--test wide.csv --by shop", "test has columns that train lacks: ['x3']"),
        ("--test no-rows.csv --by shop", "test has no rows"),
        ("--test no-rows.csv", "test has no rows"),
        ("--train text.csv --by shop", "the target 'y' of text.csv is not numeric: 'high' in group "),
        ("--train text.csv", "the target 'y' of text.csv is not numeric: 'high'"),
        ("--train word.csv --by shop", "the target 'y' of word.csv is not numeric: 'high' in group 'south'"),
        ("--train gap.csv --by shop", "14 rows of gap.csv have no 'y': leave them out, or say --on-error skip to go"),
        ("--train gap.csv", "14 rows of gap.csv have no 'y': leave them out"),
        ("--train only-y.csv", "only-y.csv has no columns beside 'y' to predict from"),
        ("--train lists.parquet --by shop", "'shop' of train holds values that cannot name a group"),
        ("--train one-row.csv", "one-row.csv has one row; a prediction needs two"),
        ("--target z", "train has no target column 'z'"),
        ("--by city", "no group column 'city'"),
        ("--by y", "'y'"),
        ("--train unique.csv --by shop", "every row of train is a group of its own: 'shop' names rows, not groups"),
        ("--train no-west.csv --by shop", "1 of 3 groups in test have fewer than 2 train rows: 'west' (0)"),
        ("--by shop --on-error stop", "--on-error is error or skip, not 'stop'"),
        ("--by shop --too-few drop", "--too-few is error, nan or pooled, not 'drop'"),
        ("--on-error skip", "are about groups, whose column --by names"),
        ("--quantiles 0.1,high", "--quantiles are numbers between 0 and 1, joined by commas, not '0.1,high'"),
        ("--quantiles 10,90", "--quantiles are numbers between 0 and 1, joined by commas, not '10,90'"),
        ("--train table.txt", "table.txt is neither a .csv nor a .parquet file"),
        ("--train empty.csv", "cannot read empty.csv: No columns"),
        ("--test broken.parquet", "cannot read broken.parquet: "),
        ("--train gone.csv", "gone.csv: No such file"),
        ("--retrofit oa.json --by shop", "inert only in the variant 'closed', not in 'oa'"),
        ("--retrofit gone.json", "gone.json is not a retrofit"),
    ],
)
def test_bad_input_is_one_message(command: str, message: str, tmp_path: Path) -> None:
    result = predict(command, tmp_path / "p.csv")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert result.stderr.count("Error:") == 1 and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_output_over_an_input_is_refused() -> None:
    before = Path("test.csv").read_bytes()
    result = predict("--by shop", "test.csv")
    assert (result.exit_code, result.stderr) == (2, "Error: --out test.csv would overwrite what is read\n")
    assert Path("test.csv").read_bytes() == before


def test_an_output_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    for out, message in ((tmp_path / "missing" / "p.csv", "No such file"), (tmp_path / "p.txt", "neither a .csv")):
        result = predict("--by shop", out)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.parametrize("command", ["predict", "bench ragged", "bench ragged-equality"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert f"oretrofit {command} " in result.stdout.split("Example:")[1]


@pytest.mark.parametrize("command", ["predict", "bench ragged", "bench ragged-equality"])
def test_cuda_without_a_gpu(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = f" --train train.csv --test test.csv --target y --out {tmp_path / 'p.csv'}" if command == "predict" else ""
    result = CliRunner().invoke(cli.app, f"{command}{more} --device cuda".split())
    assert result.exit_code == 2
    assert "no CUDA device" in result.stderr
