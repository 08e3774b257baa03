"""`oretrofit predict`: files in, files out, and what it refuses."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.calibration import settings
from oretrofit.experiments.datasets import load_dataset
from oretrofit.experiments.pretrain import save_host
from oretrofit.retrofit import api
from oretrofit.retrofit.ragged import groups, predictor, preparing

regressor = functools.partial(TabPFNRegressor, n_estimators=2, inference_precision=torch.float32)

SIZES = {"north": 9, "south": 14, "west": 6}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members instead of TabPFN's eight, and float32: in half precision answers depend on the batch."""
    for module in (predictor, preparing):
        monkeypatch.setattr(module, "TabPFNRegressor", regressor)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_host) -> Path:
    """A folder with a host, retrofits and tables, good and bad."""
    folder = tmp_path_factory.mktemp("predict")
    save_host(tiny_host.model, folder / "tiny-v3.safetensors")
    api.patch(folder / "tiny-v3.safetensors", "closed", tau=1e-3).save(folder / "closed.json")
    api.patch(folder / "tiny-v3.safetensors", "oa", tau=1e-3).save(folder / "oa.json")
    api.patch("small", "closed", tau=1e-6).save(folder / "small.json")

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
    train.assign(shop=train["shop"].where(~np.isin(np.arange(len(train)), [2, 4]))).to_csv(
        folder / "no-shop.csv", index=False
    )
    train[["y"]].to_csv(folder / "only-y.csv", index=False)
    train.head(1).to_csv(folder / "one-row.csv", index=False)
    for name, table, kinds in (("train", train, ["1", "2", "A"]), ("test", test, ["1", None, "2"])):
        kind = np.resize(np.array(kinds, dtype=object), len(table))
        table.assign(shop=table["shop"].replace("west", "NA"), kind=kind).to_csv(folder / f"{name}-NA.csv", index=False)
    train.assign(shop=[[name] for name in train["shop"]]).to_parquet(folder / "lists.parquet")
    (folder / "empty.csv").write_text("")
    (folder / "broken.parquet").write_text("PAR1, but no more")
    (folder / "table.txt").write_text("x,y\n1,2\n")
    return folder


@pytest.fixture(autouse=True)
def in_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def predict(command: str, out: Path | str):
    defaults = {"--train": "train.csv", "--test": "test.csv", "--target": "y", "--retrofit": "closed.json"}
    defaults |= {"--device": "cpu", "--precision": "float32"}
    words = command.split()
    given = [word for pair in defaults.items() if pair[0] not in words for word in pair]
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["predict", *words, *given, "--out", str(out)])


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

    plain = api.patch

    def patch(host, *args, **settings):
        made.append((host.name, *args))
        return plain(host, *args, tau=1e-3, **settings)

    monkeypatch.setattr("oretrofit.retrofit.api.patch", patch)
    command = "predict --train train.csv --test test.csv --target y --by shop --host tiny-v3.safetensors --device cpu"
    command += " --precision float32"
    result = CliRunner().invoke(cli.app, [*command.split(), "--out", str(tmp_path / "p.csv")])
    assert result.exit_code == 0, result.output
    assert made == [(str(Path("tiny-v3.safetensors").resolve()), "closed")]
    np.testing.assert_allclose(pd.read_csv(tmp_path / "p.csv")["prediction"], one_by_one([])["prediction"], atol=1e-4)


@pytest.mark.parametrize(
    ("command", "group", "message"),
    [
        ("--train gap.csv", "south", "group 'south': gap.csv: target 'y' is missing (NaN) in row 1 and in 13 more"),
        ("--train word.csv", "south", "group 'south': word.csv: target 'y' is not numeric (row 1: 'high')"),
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
    assert "Predicted 9 of 9 rows, 3 of them from the train rows of all groups, pooled (groups west)." in result.stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--test narrow.csv --by shop", "narrow.csv lacks columns that train.csv has: ['x2']\n"),
        ("--test narrow.csv", "narrow.csv lacks columns that train.csv has: ['x2']\n"),
        ("--test wide.csv --by shop", "wide.csv has columns that train.csv lacks: ['x3']\n"),
        ("--test no-rows.csv --by shop", "no-rows.csv has no rows"),
        ("--test no-rows.csv", "no-rows.csv has no rows"),
        (
            "--train text.csv --by shop",
            "group 'south': text.csv: target 'y' is not numeric (row 1: 'high'); such groups",
        ),
        ("--train text.csv", "Error: text.csv: target 'y' is not numeric (row 1: 'high')\n"),
        ("--train word.csv --by shop", "group 'south': word.csv: target 'y' is not numeric (row 1: 'high')"),
        ("--train gap.csv --by shop", "group 'south': gap.csv: target 'y' is missing (NaN) in row 1 and in 13 more"),
        (
            "--train gap.csv",
            "Error: gap.csv: target 'y' is missing (NaN) in row 1 and in 13 more; leave such rows out\n",
        ),
        ("--train only-y.csv", "only-y.csv has no columns beside 'y' to predict from"),
        ("--train lists.parquet --by shop", "'shop' of lists.parquet holds values that cannot name a group"),
        ("--train one-row.csv", "one-row.csv has one row; a prediction needs two"),
        ("--target z", "train.csv has no target column 'z'; its columns are ['x1', 'x2', 'shop', 'kind', 'y']"),
        ("--by city", "no group column 'city'"),
        ("--train no-shop.csv --by shop", "2 rows of no-shop.csv have no group in 'shop', such as row 3"),
        ("--by y", "'y'"),
        ("--train unique.csv --by shop", "every row of unique.csv is a group of its own: 'shop' names rows"),
        ("--train no-west.csv --by shop", "1 of 3 groups in test.csv have fewer than 2 train rows: 'west' (0)"),
        ("--by shop --on-error stop", "--on-error is error or skip, not 'stop'"),
        ("--by shop --too-few drop", "--too-few is error, nan or pooled, not 'drop'"),
        ("--on-error skip", "are about groups, whose column --by names"),
        ("--quantiles 0.1,high", "--quantiles are numbers between 0 and 1, joined by commas, not '0.1,high'"),
        ("--quantiles 10,90", "--quantiles are numbers between 0 and 1, joined by commas, not '10,90'"),
        ("--train table.txt", "table.txt has one row; a prediction needs two"),
        ("--train empty.csv", "cannot read empty.csv: it is empty; a first line with the columns' names is needed"),
        ("--test broken.parquet", "cannot read broken.parquet: "),
        ("--train gone.csv", "gone.csv: No such file"),
        ("--retrofit oa.json --by shop", "inert only in the variant 'closed', not in 'oa'"),
        ("--retrofit gone.json", "--retrofit gone.json: there is no such file"),
        ("--retrofit train.csv", "train.csv is not a retrofit"),
        ("--retrofit train.parquet", "train.parquet is not a retrofit written by oretrofit; `oretrofit patch --out`"),
        ("--host gone.ckpt", "--host: no host 'gone.ckpt'"),
        ("--precision half", "--precision: unknown precision 'half'"),
        ("--by prediction", "the group column cannot be called 'prediction'"),
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
    assert result.exit_code == 2
    assert result.stderr == "Error: --out test.csv would overwrite what is read; give another file\n"
    assert Path("test.csv").read_bytes() == before


def test_an_output_among_the_parts_of_an_input_is_refused(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    pd.read_parquet("train.parquet").to_parquet(parts / "0.parquet")
    result = predict(f"--train {parts} --by shop", parts / "p.parquet")
    assert result.exit_code == 2
    assert "would be a part of what is read; give a file in another folder" in result.stderr
    assert [path.name for path in parts.iterdir()] == ["0.parquet"]


def test_an_output_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    for out, message in (
        (tmp_path / "missing" / "p.csv", "No such file"),
        (tmp_path / "p.txt", "ends in none of .csv, .csv.gz"),
    ):
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


@pytest.mark.parametrize(
    "options",
    [
        "--quantiles 2",
        "--precision half",
        "--device tpu",
        "--on-error skip",
        "--out p.txt",
        "--host gone",
        "--out train.csv",
    ],
)
def test_options_are_checked_before_the_imports(options: str) -> None:
    """Torch and pandas take seconds."""
    command = f"predict --train train.csv --test test.csv --target y --out p.csv {options}"
    script = (
        "import sys; from typer.testing import CliRunner; from oretrofit import cli\n"
        f"result = CliRunner().invoke(cli.app, {command.split()!r})\n"
        "assert result.exit_code == 2 and result.stderr.count('Error:') == 1, result.output\n"
        "assert not {'torch', 'pandas', 'tabpfn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_was_predicted_is_kept_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after the work: the earlier file stays, and what was predicted is in the current folder."""
    out, here, to_csv = tmp_path / "full" / "p.csv", tmp_path / "here", pd.DataFrame.to_csv

    def full(self, path, **settings):
        if Path(path).parent == out.parent:
            Path(path).write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return to_csv(self, path, **settings)

    for folder in (out.parent, here):
        folder.mkdir()
    out.write_text("earlier")
    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    files = Path.cwd()
    monkeypatch.chdir(here)
    result = predict(f"--train {files}/train.csv --test {files}/test.csv --retrofit {files}/closed.json --by shop", out)
    assert result.exit_code == 1 and "Written to" not in result.stdout
    (kept,) = here.iterdir()
    expected = f"Error: {out}: No space left on device; what was to be written is in {kept}"
    assert result.stderr.splitlines() == [expected]
    assert [(path.name, path.read_text()) for path in out.parent.iterdir()] == [("p.csv", "earlier")]
    np.testing.assert_allclose(pd.read_csv(kept)["prediction"], one_file_by_one(files), atol=1e-4)


def one_file_by_one(folder: Path) -> pd.Series:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return one_by_one([])["prediction"]
    finally:
        os.chdir(before)


# ---- What files hold, and what is read ------------------------------------------------------------


def predicted(
    folder: Path, train: str | pd.DataFrame, test: str | pd.DataFrame, options: str = "", suffix: str = "csv"
):
    """The predictions of two files with the trained host, and the command's result."""
    for name, content in (("train", train), ("test", test)):
        file = folder / f"{name}.{suffix}"
        if isinstance(content, str):
            file.write_text(content)
        else:
            content.to_parquet(file) if suffix == "parquet" else content.to_csv(file, index=False)
    files = f"--train {folder}/train.{suffix} --test {folder}/test.{suffix}"
    result = predict(f"{files} --retrofit small.json {options}", folder / "p.csv")
    assert result.exit_code == 0, result.output
    return pd.read_csv(folder / "p.csv")["prediction"].to_numpy(), result


def by_tabpfn(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """What TabPFN itself predicts with the same model from typed tables, the last column of train being the target."""
    fitted = regressor(
        model_path=api.load("small.json").specs, device="cpu", inference_config={"TRANSFORM_DATES": True}
    )
    return fitted.fit(train.iloc[:, :-1], train.iloc[:, -1]).predict(test)


SALES = "sales,price,promo\n10,1,0\n20,2,1\n30,3,0\n40,4,1\n50,5,0\n", "price,promo\n2.5,0\n4.5,1\n"


@pytest.mark.parametrize("precision", settings.PRECISIONS)
def test_precisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Each as TabPFN calls it."""
    given: list[object] = []
    predict_long = groups.predict_long

    def recorded(*args, inference_precision, **more):
        given.append(inference_precision)
        return predict_long(*args, inference_precision=torch.float32, **more)

    monkeypatch.setattr(groups, "predict_long", recorded)
    result = predict(f"--precision {precision}", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    assert given == [{"float32": torch.float32, "float64": torch.float64}.get(precision, precision)]


def test_autocast_on_a_cpu_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tabpfn.utils._cpu_supports_fast_bf16", lambda: False)
    monkeypatch.setattr(predictor, "TabPFNRegressor", TabPFNRegressor)
    result = predict("--precision autocast", tmp_path / "p.csv")
    assert result.exit_code == 2
    assert "Set `--precision auto` to fall back" in result.stderr and "inference_precision" not in result.stderr


@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)])
def test_a_separator_at_the_ends_of_the_rows(tmp_path: Path, sides: tuple[int, ...]) -> None:
    plain, _ = predicted(tmp_path, *SALES, "--target sales")
    ended = [
        content.replace("\n", ",\n").replace(",\n", "\n", 1) if side in sides else content
        for side, content in enumerate(SALES)
    ]
    found, _ = predicted(tmp_path, ended[0], ended[1], "--target sales")
    np.testing.assert_array_equal(found, plain)
    np.testing.assert_allclose(found, [25, 45], atol=5)  # ten times the price, whose steps are 10


def test_names_in_front_of_the_rows(tmp_path: Path) -> None:
    plain, _ = predicted(tmp_path, *SALES, "--target sales")
    named = []
    for content in SALES:
        header, *rows = content.splitlines()
        named.append("\n".join([header, *(f'"r{i}",{row}' for i, row in enumerate(rows))]) + "\n")
    found, result = predicted(tmp_path, named[0], named[1], "--target sales")
    assert "test.csv: each row begins with a name, such as 'r0', for which the header has none" in result.stderr
    np.testing.assert_array_equal(found, plain)
    assert list(pd.read_csv(tmp_path / "p.csv")["index"]) == ["r0", "r1"]


def week(gap_in_train: bool = False, gap_in_test: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Seven weeks of days, y is ten times the day of the week, and the next week."""
    days = pd.Series(pd.date_range("2024-01-01", periods=56))
    train = pd.DataFrame({"day": days[:49], "y": 10.0 * days[:49].dt.day_of_week})
    test = pd.DataFrame({"day": days[49:]}).reset_index(drop=True)
    if gap_in_train:
        train.loc[20, "day"] = None
    if gap_in_test:
        test.loc[3, "day"] = None
    return train, test


def as_dates(frame: pd.DataFrame) -> pd.DataFrame:
    days = frame["day"].dt.date
    return frame.assign(day=days.astype(object).where(days.notna(), None))


AS_THEY_ARE = [as_dates, lambda f: f, lambda f: f.assign(day=f["day"].dt.strftime("%Y-%m-%d"))]


@pytest.mark.parametrize("gaps", [(False, False), (True, False), (False, True), (True, True)])
def test_dates_with_gaps(tmp_path: Path, gaps: tuple[bool, bool]) -> None:
    """In CSV, and in Parquet as date32, timestamps and text."""
    train, test = week(*gaps)
    expected = by_tabpfn(train, test)
    filled = ~test["day"].isna().to_numpy()
    np.testing.assert_allclose(expected[filled], 10.0 * np.arange(7)[filled], atol=5)  # it tells the days apart
    for change, suffix in ((AS_THEY_ARE[1], "csv"), *((change, "parquet") for change in AS_THEY_ARE)):
        found, result = predicted(tmp_path, change(train), change(test), suffix=suffix)
        np.testing.assert_allclose(found, expected, atol=1e-3)
        assert "Dates: day." in result.stdout


def test_a_gap_in_one_group_is_none_in_another(tmp_path: Path) -> None:
    clean, gappy, test = week()[0], week(gap_in_train=True)[0], week()[1]
    train = pd.concat([clean.assign(g="a"), gappy.assign(g="b")])
    tests = pd.concat([test.assign(g="a"), test.assign(g="b")])
    found, _ = predicted(tmp_path, train, tests, "--by g")
    np.testing.assert_allclose(found[:7], by_tabpfn(clean, test), atol=1e-3)
    np.testing.assert_allclose(found[7:], by_tabpfn(gappy, test), atol=1e-3)


def test_dates_on_one_side_only(tmp_path: Path) -> None:
    train, test = week()
    for change, message in (
        (lambda f: f.assign(day="soon"), "test.csv: column 'day': 'soon' (row 1) is no date like 2024-12-31"),
        (lambda f: f.assign(day=range(7)), "test.csv: column 'day': '0' (row 1) is no date"),
        (lambda f: f.assign(day="31/12/2024"), "test.csv: column 'day': '31/12/2024' (row 1) is no date"),
    ):
        train.to_csv(tmp_path / "train.csv", index=False)
        change(test).to_csv(tmp_path / "test.csv", index=False)
        result = predict(
            f"--train {tmp_path}/train.csv --test {tmp_path}/test.csv --retrofit small.json", tmp_path / "p.csv"
        )
        assert result.exit_code == 2 and message in result.stderr


def strays(cell: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Groups a and b of twelve rows, y is 10 x (and 5 more in b); one x of b is a stray cell."""
    x = [*range(12)] * 2
    train = pd.DataFrame({"g": ["a"] * 12 + ["b"] * 12, "x": [str(v) for v in x]})
    train["y"] = [10.0 * v for v in x[:12]] + [10.0 * v + 5 for v in x[12:]]
    train.loc[15, "x"] = cell
    return train, pd.DataFrame({"g": ["a", "a", "b", "b"], "x": [12, 5, 12, 5]})


@pytest.mark.parametrize("cell", ["?", "unknown"])
def test_a_stray_cell_in_one_group(tmp_path: Path, cell: str) -> None:
    train, test = strays(cell)
    found, result = predicted(tmp_path, train, test, "--by g")
    assert f"train.csv: column 'x': {cell!r} (row 16) is no number; the cell counts as empty" in result.stderr
    for group, rows in (("a", [0, 1]), ("b", [2, 3])):
        own = train[train["g"] == group].drop(columns="g")
        own = own.assign(x=pd.to_numeric(own["x"], errors="coerce"))
        np.testing.assert_allclose(found[rows], by_tabpfn(own, test.loc[rows, ["x"]]), atol=1e-3)
    np.testing.assert_allclose(found[:2], [120, 50], atol=10)  # ten times x, and x = 12 is beyond what it has seen


def test_a_stray_cell_in_what_is_to_be_predicted(tmp_path: Path) -> None:
    train, test = strays("3")
    train.to_csv(tmp_path / "train.csv", index=False)
    test.astype(object).assign(x=["12", "5", "many", "5"]).to_csv(tmp_path / "test.csv", index=False)
    command = f"--train {tmp_path}/train.csv --test {tmp_path}/test.csv --retrofit small.json --by g"
    result = predict(command, tmp_path / "p.csv")
    message = f"{tmp_path}/test.csv: column 'x': 'many' (row 3) is no number"
    assert result.exit_code == 2 and f"Error: group 'b': {message}" in result.stderr
    result = predict(f"{command} --on-error skip", tmp_path / "p.csv")
    assert result.exit_code == 0 and f"No prediction for group 'b': {message}" in result.stderr
    found = pd.read_csv(tmp_path / "p.csv")["prediction"]
    assert found.isna().tolist() == [False, False, True, True]
    own = train[:12].drop(columns="g").astype(float)
    np.testing.assert_allclose(found[:2], by_tabpfn(own, test.loc[:1, ["x"]].astype(float)), atol=1e-3)


@pytest.mark.parametrize("gaps", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_truth_values_with_gaps(tmp_path: Path, gaps: tuple[int, ...], suffix: str) -> None:
    rng = np.random.default_rng(0)
    flag = rng.random(40) > 0.5
    frame = pd.DataFrame({"flag": flag.astype(object), "x": rng.standard_normal(40), "y": 10.0 * flag})
    frame.loc[[row for side, row in ((0, 3), (1, 35)) if side in gaps], "flag"] = None
    found, _ = predicted(tmp_path, frame[:30], frame[30:].drop(columns="y"), suffix=suffix)
    numbers = frame.assign(flag=frame["flag"].astype(float))
    np.testing.assert_allclose(found, by_tabpfn(numbers[:30], numbers[30:].drop(columns="y")), atol=1e-3)
    known = frame["flag"][30:].notna().to_numpy()
    np.testing.assert_allclose(found[known], 10.0 * flag[30:][known], atol=5)


def test_commas_between_thousands(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(1_000, 2_000_000, 40)
    plain = pd.DataFrame({"x": x, "y": x / 1e5})
    written = plain.assign(x=[f"{v:,}" for v in x], y=[f"{v:,.5f}" for v in plain["y"]])
    expected, _ = predicted(tmp_path, plain.assign(y=plain["y"].round(5))[:30], plain[["x"]][30:])
    found, result = predicted(tmp_path, written[:30], written[["x"]][30:])
    np.testing.assert_array_equal(found, expected)
    assert f"train.csv: column 'x': '{x[0]:,}' (row 1) is read as {x[0]}\n" in result.stderr


@pytest.mark.parametrize(
    ("train", "test", "name"),
    [
        ("x,x,y\n1,2,3\n2,3,4\n", "x,x\n1,2\n", "'x'"),
        ("x,y,y\n1,2,3\n2,3,4\n", "x\n1\n", "'y'"),
        ("x,z,y\n1,2,3\n2,3,4\n", "x,z,z\n1,2,3\n", "'z'"),
    ],
)
def test_repeated_names(tmp_path: Path, train: str, test: str, name: str) -> None:
    for file, content in (("train", train), ("test", test)):
        (tmp_path / f"{file}.csv").write_text(content)
    result = predict(f"--train {tmp_path}/train.csv --test {tmp_path}/test.csv", tmp_path / "p.csv")
    assert result.exit_code == 2 and f"several columns called {name}; rename or remove them" in result.stderr


def test_groups_that_differ_only_in_writing(tmp_path: Path) -> None:
    train = "id,x,y\n" + "".join(f"{i},{x},{10 * x + i}\n" for i in (1, 2, 3) for x in range(8))
    test = "id,x\n1.0,3\n02,4\n3,5\n"
    for too_few in ("", "--too-few error"):
        (tmp_path / "train.csv").write_text(train)
        (tmp_path / "test.csv").write_text(test)
        result = predict(
            f"--train {tmp_path}/train.csv --test {tmp_path}/test.csv --by id --retrofit small.json {too_few}",
            tmp_path / "p.csv",
        )
        assert result.exit_code == 2
        assert "groups '1.0' and '1'; '02' and '2' of test and train differ only in how they are" in result.stderr
    found, result = predicted(tmp_path, train, test, "--by id --too-few pooled")
    assert (
        "Predicted 3 of 3 rows, 2 of them from the train rows of all groups, pooled (groups 1.0, 02)." in result.stdout
    )
    assert result.stderr.count("differ only in how they are written") == 1
    table = pd.DataFrame({"x": [*range(8)] * 3, "y": [10.0 * x + i for i in (1, 2, 3) for x in range(8)]})
    np.testing.assert_allclose(found[:2], by_tabpfn(table, pd.DataFrame({"x": [3, 4]})), atol=1e-3)
    np.testing.assert_allclose(found[2:], by_tabpfn(table[16:], pd.DataFrame({"x": [5]})), atol=1e-3)


# ---- One reading for all --------------------------------------------------------------------------


def mixed() -> pd.DataFrame:
    """Numbers, dates, truth values, categories and times, with gaps."""
    rng = np.random.default_rng(1)
    n = 50
    frame = pd.DataFrame({"x": rng.standard_normal(n).round(3), "day": pd.date_range("2024-01-01", periods=n)})
    frame["flag"] = pd.Series(rng.random(n) > 0.5).astype("boolean")
    frame["city"] = rng.choice(["Zürich", "Orléans", "Genève"], n)
    frame["at"] = [pd.Timestamp(f"2024-01-01 {8 + i % 9}:30").time() for i in range(n)]
    for i, column in enumerate(("x", "day", "flag", "city")):
        frame.loc[[5 + i, 44 + i], column] = None
    frame["y"] = 10 * frame["x"].fillna(0) + frame["day"].dt.day_of_week.fillna(3)
    return frame


def write_csv(frame: pd.DataFrame, file: Path, encoding: str = "utf-8", **settings) -> None:
    text = frame.to_csv(index=False, **settings)
    file.write_bytes(text.encode(encoding))


WRITERS: dict[str, Callable[..., None]] = {
    "t.csv": write_csv,
    "t.CSV": functools.partial(write_csv, encoding="utf-8-sig", lineterminator="\r\n"),
    "t.tsv": functools.partial(write_csv, sep="\t"),
    "semicolons.csv": functools.partial(write_csv, sep=";", decimal=","),
    "utf16.csv": functools.partial(write_csv, encoding="utf-16"),
    "latin1.csv": functools.partial(write_csv, encoding="latin-1"),
    "t.csv.gz": lambda frame, file: frame.to_csv(file, index=False),
    "t.parquet": lambda frame, file: frame.to_parquet(file),
    "t.feather": lambda frame, file: frame.reset_index(drop=True).to_feather(file),
}


def test_every_format_gives_the_same_predictions(tmp_path: Path) -> None:
    """And `predict_groups` of the same frames, and `eval`'s reading has the same columns."""
    frame = mixed()
    train, test = frame[:40], frame[40:].drop(columns="y").reset_index(drop=True)
    closed = api.load("small.json")
    groups = [part.assign(g="all") for part in (train, test)]
    series = closed.predict_groups(*groups, target="y", by="g")
    tables = []
    for name, write in WRITERS.items():
        for part, content in (("train", train), ("test", test)):
            (tmp_path / part).mkdir(exist_ok=True)
            write(content, tmp_path / part / name)
        files = f"--train {tmp_path}/train/{name} --test {tmp_path}/test/{name}"
        result = predict(f"{files} --retrofit small.json", tmp_path / "p.csv")
        assert result.exit_code == 0, result.output
        assert "Numbers: x, flag, at. Dates: day. Categories: city." in result.stdout, name
        found = pd.read_csv(tmp_path / "p.csv", float_precision="round_trip")["prediction"]
        np.testing.assert_array_equal(found, series, err_msg=name)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the separator, the encoding, and how decimal commas were read
            X = load_dataset(f"csv:{tmp_path}/train/{name}#y").X
        assert list(X)[:4] == ["x", "flag", "city", "at"] and all(column.startswith("day_") for column in list(X)[4:])
        tables.append(X)
    for X in tables[1:]:
        pd.testing.assert_frame_equal(X, tables[0])
    fitted = regressor(model_path=closed.specs, device="cpu").fit(tables[0], train["y"])
    own = by_tabpfn(numbers(train), numbers(train.drop(columns="y")))
    np.testing.assert_allclose(fitted.predict(tables[0]), own, atol=1e-3)


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """By hand: truth values and times as numbers."""
    return frame.assign(
        flag=frame["flag"].astype("Float64").astype(float), at=[3600.0 * t.hour + 60 * t.minute for t in frame["at"]]
    )


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("x,y\n1,2\n2,3\n3,4,5\n", "x\n1\n", "train.csv: line 4 has 3 cells and the header 2"),
        ("x,z,y\n1,1,2\n2,2,3\n", "x,z\n1\n", "test.csv: line 2 has 1 cells and the header 2"),
        ("x,y\ninf,2\n2,3\n", "x\n1\n", "train.csv: column 'x' is infinite in row 1"),
        ("x,y\n1,2\n2,3\n", "x\n1\n-inf\n", "test.csv: column 'x' is infinite in row 2"),
        ("x,y\n1,inf\n2,3\n", "x\n1\n", "train.csv: target 'y' is infinite in row 1"),
        ("x,y\n1,2\n2,3\n", "x\na\n", "test.csv: column 'x': 'a' (row 1) is no number, as those of"),
        ("x,y\na,2\nb,3\n", "x\n1\n", "test.csv: column 'x' holds numbers, such as '1' (row 1), and that of"),
        (
            "x,y\n1.2.2024,2\n2.2.2024,3\n",
            "x\n3.2.2024\n",
            "train.csv: column 'x': '1.2.2024' (row 1) looks like a date",
        ),
    ],
)
def test_bad_cells_are_named(tmp_path: Path, train: str, test: str, message: str) -> None:
    for file, content in (("train", train), ("test", test)):
        (tmp_path / f"{file}.csv").write_text(content)
    result = predict(f"--train {tmp_path}/train.csv --test {tmp_path}/test.csv", tmp_path / "p.csv")
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert result.stderr.count("Error:") == 1


def test_more_columns_than_the_host_takes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((6, 502))).set_axis([f"x{i}" for i in range(502)], axis="columns")
    frame.assign(y=range(6)).to_csv(tmp_path / "train.csv", index=False)
    frame.to_csv(tmp_path / "test.csv", index=False)
    files = f"--train {tmp_path}/train.csv --test {tmp_path}/test.csv"
    result = predict(f"{files} --retrofit small.json", tmp_path / "p.csv")
    assert result.exit_code == 2
    assert "train.csv has 502 columns to predict from" in result.stderr and "takes 500; leave some out" in result.stderr
