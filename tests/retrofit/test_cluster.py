"""A Dask cluster of two processes over TCP: the answers of one machine, whatever becomes of its workers."""

import os
import re
import signal
import time
import warnings
from contextlib import closing

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from oretrofit import TableError, cli, patch
from oretrofit.retrofit import cluster
from oretrofit.retrofit.cluster import connected
from oretrofit.retrofit.predict_files import PredictOptions, predict_files
from oretrofit.retrofit.workers import call_each

HERE = os.getpid()

# In float64 batches of other tables move an answer by what TabPFN rounds behind them (test_ragged.py), in standard
# deviations of the target.
OPTIONS = {"device": "cpu", "inference_precision": torch.float64, "n_estimators": 2}
SAME = 1e-5


@pytest.fixture(scope="session")
def closed(tiny_host):
    """A closed retrofit with so large a delta that gating shows."""
    return patch(tiny_host, "closed", tables=1, delta=0.05)


# ---- Calls ---------------------------------------------------------------------------------------


def on(client, function, arguments, **settings):
    return call_each(function, arguments, 0, client=client, **settings)


def test_each_argument_is_answered_once_by_workers_of_one_thread(client):
    found = dict(on(client, lambda i: (i * i, os.getpid(), torch.get_num_threads()), range(20)))
    assert {i: square for i, (square, _, _) in found.items()} == {i: i * i for i in range(20)}
    assert {threads for _, _, threads in found.values()} == {1}
    assert HERE not in {pid for _, pid, _ in found.values()}


class Counted:
    """A function that knows how often it was unpacked in its process."""

    unpacked = 0

    def __init__(self):
        self.weight = np.arange(1_000_000)  # 8 MB

    def __setstate__(self, state):
        self.__dict__ = state
        type(self).unpacked += 1

    def __call__(self, i):
        time.sleep(0.05)  # so that both workers get some
        return os.getpid(), type(self).unpacked, int(self.weight[i])


def test_the_function_is_sent_and_unpacked_once_a_worker(client):
    def received(dask_worker):
        return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)

    before = client.run(received)
    pids, unpacked, answers = zip(*(answer for _, answer in on(client, Counted(), range(20))), strict=True)
    assert sorted(answers) == list(range(20))
    assert len(set(pids)) == 2 and set(unpacked) == {1}
    # One has it from the scheduler, the other from its neighbour: 8 MB, and no more.
    after = client.run(received)
    assert sorted((after[name] - before[name]) // 8_000_000 for name in after) == [0, 1]


def test_arguments_are_taken_as_they_are_needed(client):
    taken = []
    arguments = (taken.append(i) or i for i in range(100))
    with closing(on(client, lambda i: i, arguments, ahead=5)) as answers:
        for done, _ in enumerate(answers):
            assert len(taken) <= done + 5 + 1


class Unsendable:
    """Neither way."""

    def __reduce__(self):
        raise TypeError("not sent")


def test_what_cannot_be_sent_is_called_here(client):
    arguments = [1, Unsendable(), 2]
    found = dict(on(client, lambda argument: (argument, os.getpid()), arguments))
    assert found[1] == (arguments[1], HERE)
    assert found[0][0] == 1 and found[2][0] == 2 and HERE not in (found[0][1], found[2][1])
    back = dict(on(client, lambda i: Unsendable() if i == 1 else i, range(3)))
    assert back[0] == 0 and isinstance(back[1], Unsendable) and back[2] == 2


def test_an_error_is_the_callers(client):
    with pytest.raises(TypeError, match="unsupported operand"):
        list(on(client, lambda i: i**2, [1, "two", 3]))


def test_workers_warn_once(client):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(on(client, lambda _: warnings.warn("of every call", stacklevel=2), range(6)))
    assert [str(warning.message) for warning in caught] == ["of every call"]


def test_closing_takes_back_what_has_not_begun(client, tmp_path):
    def leave_a_trace(i):
        time.sleep(0.2)
        (tmp_path / str(i)).touch()

    answers = on(client, leave_a_trace, range(1000), ahead=30)
    next(answers)
    answers.close()
    time.sleep(1)
    assert len(list(tmp_path.iterdir())) <= 6  # the first; and what each worker had begun, or was about to


# ---- Connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1", "nowhere://x:1"])
def test_no_scheduler(address, monkeypatch):
    monkeypatch.setattr(cluster, "_PATIENCE", 1)
    with pytest.raises(ValueError, match=f"no Dask scheduler answers at {address}: "), connected(address):
        pass


def test_no_dask(monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'oretrofit\[dask\]'"), connected("local"):
        pass


def test_other_versions_are_said(client, monkeypatch):
    here = cluster._versions()
    monkeypatch.setattr(cluster.importlib.metadata, "version", lambda name: {**here, "torch": "0.1"}[name])
    with pytest.warns(UserWarning, match=f"torch is 0.1 here and {re.escape(here['torch'])} in the cluster's "):
        with connected(client.scheduler.address) as another:
            assert another.submit(abs, -1).result() == 1


# ---- Predictions ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tables():
    """Eighteen small ones, and a large one."""
    rng = np.random.default_rng(0)
    found = []
    for n, columns in [(400, 3), *((8 + i, 1 + i % 4) for i in range(18))]:
        X = rng.standard_normal((n + 4, columns))
        y = X[:, 0] + 0.1 * rng.standard_normal(n + 4)
        found.append((X[:n], y[:n], X[n:]))
    return found


def lists(tables):
    return map(list, zip(*tables, strict=True))


def test_predict_ragged(client, closed, tables):
    expected = closed.predict_ragged(*lists(tables), n_jobs=0, **OPTIONS)
    done = []
    actual, report = closed.predict_ragged(
        *lists(tables), client=client, return_report=True, on_tables=done.append, **OPTIONS
    )
    for a, e, (_, y, _) in zip(actual, expected, tables, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=SAME * np.std(y))
    assert (report.tables, report.members, report.errors) == (19, 38, {})
    assert report.batches < report.members and 0 <= report.padding <= 0.25
    assert done[-1] == 19 and len(done) > 2


def test_a_bad_table(client, closed, tables):
    bad = [*tables[1:9], (tables[9][0], np.full(len(tables[9][0]), np.nan), tables[9][2])]
    with pytest.raises(TableError, match="table 8: "):
        closed.predict_ragged(*lists(bad), client=client, **OPTIONS)
    actual, report = closed.predict_ragged(*lists(bad), client=client, on_error="skip", return_report=True, **OPTIONS)
    assert actual[8] is None and list(report.errors) == [8] and report.tables == 8


def test_predict_groups(client, closed):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"store": rng.choice(list("abcdefgh"), 160), "x": rng.standard_normal(160)})
    frame["kind"] = rng.choice(["sun", "rain"], 160)
    frame["sold"] = 10 * frame["x"] + rng.standard_normal(160)
    names = {"target": "sold", "by": "store", "output_type": "main", "quantiles": [0.1, 0.9], **OPTIONS}
    train, test = frame[:120], frame[120:].assign(store=[*frame["store"][120:159], "z"])
    names["too_few"] = "nan"
    expected = closed.predict_groups(train, test, n_jobs=0, **names)
    actual, report = closed.predict_groups(train, test, client=client, return_report=True, **names)
    pd.testing.assert_frame_equal(actual, expected, rtol=0, atol=SAME * frame["sold"].std())
    assert report.errors == {"z": "train rows: 0; at least 2 are needed"} and report.tables == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"client": "tcp://x:1"}, "client is a dask.distributed.Client"), ({"n_jobs": 2}, "n_jobs counts processes here")],
)
def test_refused(client, closed, tables, settings, message):
    with pytest.raises(ValueError, match=message):
        closed.predict_ragged(*lists(tables), **{"client": client, **settings}, **OPTIONS)


# ---- Folders -------------------------------------------------------------------------------------

SHOPS = list("abcdefghijkl")


@pytest.fixture(scope="module")
def panel(closed, tmp_path_factory):
    """Train and test in folders of four files, among which each shop's rows lie, and in one file each; and a host.

    Shop `z` is in test only, and `day` is empty in shop `a`.
    """
    folder = tmp_path_factory.mktemp("panel")
    closed.save_checkpoint(folder / "closed-v3.safetensors")
    rng, n = np.random.default_rng(0), 360
    rows = pd.DataFrame({"shop": rng.choice(SHOPS, n), "x": rng.standard_normal(n), "n": rng.integers(0, 9, n)})
    rows["day"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, n), "D")
    rows["day"] = rows["day"].mask(rows["shop"] == "a")
    rows["kind"] = rng.choice(["red", "green", "7", None], n)
    rows["y"] = 10 * rows["x"] + rows["n"] + rng.standard_normal(n)
    train, test = rows[:264].copy(), rows[264:].drop(columns="y")
    test.iloc[[3, 50], 0] = "z"
    test["id"] = [f"row {i}" for i in range(len(test))]
    for name, table in (("train", train), ("test", test)):
        write(table, folder, name)
    return folder


def write(table, folder, name):
    parts = [table.iloc[i::4] for i in range(4)]
    (folder / name).mkdir()
    for i, part in enumerate(parts):
        part.to_parquet(folder / name / f"{i}.parquet", index=False)
    pd.concat(parts).to_parquet(folder / f"{name}.parquet", index=False)


@pytest.fixture
def predict(client, panel, monkeypatch):
    """`oretrofit predict` in that folder, with options of which it has others by default."""
    monkeypatch.chdir(panel)
    defaults = {"--train": "train", "--test": "test", "--target": "y", "--by": "shop", "--device": "cpu"}
    defaults |= {"--retrofit": "closed-v3.safetensors", "--precision": "float64", "--dask": client.scheduler.address}

    def run(command):
        words = command.split()
        given = [word for name, value in defaults.items() if name not in words for word in (name, value)]
        return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["predict", *words, *given])

    return run


def assert_same(found, expected):
    """Answers to the same rows, in whatever order."""
    found, expected = (frame.set_index("id").sort_index() for frame in (found, expected))
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=SAME * 10)  # the target's standard deviation
    assert expected["prediction"].std() > 1  # rows are told apart


@pytest.fixture(scope="module")
def expected(closed, panel):
    """What one process answers to the tables in one file each."""
    train, test = (pd.read_parquet(panel / f"{name}.parquet") for name in ("train", "test"))
    names = {"target": "y", "by": "shop", "too_few": "nan", "output_type": "main", "quantiles": [0.1]}
    answers = closed.predict_groups(
        train, test.drop(columns="id"), **names, n_jobs=0, device="cpu", inference_precision=torch.float64
    )
    return test[["shop", "id"]].assign(**{"prediction": answers["mean"], "q0.1": answers[0.1]})


def test_folders_are_predicted_as_one_table(predict, expected, tmp_path):
    result = predict(f"--quantiles 0.1 --keep id --too-few nan --out {tmp_path}/out")
    assert result.exit_code == 0, result.output
    assert_same(pd.read_parquet(tmp_path / "out"), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "Read train (264 rows) and test (96). Numbers: x, n. Dates: day. Categories: kind." in result.stdout
    assert "Predicted 94 of 96 rows.\nTables: 12; forward passes: " in result.stdout
    assert "No prediction for group 'z': train rows: 0; at least 2 are needed" in result.output

    again = predict(f"--keep id --keep x --too-few nan --out {tmp_path}/out")  # in place of the earlier answer
    assert again.exit_code == 0, again.output
    assert list(pd.read_parquet(tmp_path / "out")) == ["shop", "id", "x", "prediction"]


def test_files_are_predicted_by_a_cluster_too(predict, expected, tmp_path):
    out = tmp_path / "p.parquet"
    result = predict(f"--train train.parquet --test test.parquet --quantiles 0.1 --keep id --too-few nan --out {out}")
    assert result.exit_code == 0, result.output
    assert_same(pd.read_parquet(out), expected)


def test_the_index_of_a_folder_is_kept(predict, panel, expected, tmp_path):
    (tmp_path / "test").mkdir()
    for file in (panel / "test").iterdir():
        pd.read_parquet(file).set_index("id").to_parquet(tmp_path / "test" / file.name)
    result = predict(f"--test {tmp_path}/test --quantiles 0.1 --too-few nan --out {tmp_path}/out")
    assert result.exit_code == 0, result.output
    assert_same(pd.read_parquet(tmp_path / "out"), expected)


def test_what_is_kept_is_as_it_was_whatever_columns_are_called(predict, panel, closed, tmp_path):
    kept = {
        "whole": pa.array([2**60 + i if i % 3 else None for i in range(24)]),
        "flag": pa.array([None, True, False] * 8),
        "clock": pa.array(range(24), pa.time32("s")),
        "price": pa.array(range(24)).cast(pa.decimal128(21, 2)),
        "code": pa.array([b"\xff%c" % i for i in range(24)], pa.binary(2)),
        "time": pa.array([2**60 + i for i in range(24)], pa.timestamp("ns", "Asia/Tokyo")),
        "word": pa.array(["red", None, "green"] * 8).dictionary_encode(),
    }
    for side in ("train", "test"):
        (tmp_path / side).mkdir()
        for clock, file in zip("Japan UTC Europe/Paris UTC".split(), sorted((panel / side).iterdir()), strict=True):
            frame = pd.read_parquet(file).rename(columns={"x": "(position)", "n": "_partitions", "kind": "0"})
            frame["day"] = frame["day"].dt.tz_localize(clock)
            table = pa.Table.from_pandas(frame, preserve_index=False)
            for name, values in kept.items() if side == "test" else ():
                table = table.append_column(name, values)
            pq.write_table(table, tmp_path / side / file.name)
        pq.write_table(table[:0], tmp_path / side / "4.parquet")
    names = f"--train {tmp_path}/train --test {tmp_path}/test --out {tmp_path}/out" + " --keep ".join(["", "id", *kept])
    result = predict(f"{names} --too-few nan")
    assert result.exit_code == 0, result.output
    found, test = (pq.read_table(tmp_path / name).sort_by("id") for name in ("out", "test"))
    for name in ["shop", "id", *kept]:
        assert found[name].equals(test[name].cast(pa.string()) if name == "word" else test[name])

    train, test = (pd.read_parquet(tmp_path / side) for side in ("train", "test"))
    settings = {"target": "y", "by": "shop", "too_few": "nan", "device": "cpu", "inference_precision": torch.float64}
    expected = closed.predict_groups(train, test[train.columns.drop("y")], **settings)
    assert_same(found.select(["id", "prediction"]).to_pandas(), test[["id"]].assign(prediction=expected))


def test_a_bad_group(predict, panel, expected, tmp_path):
    (tmp_path / "bad").mkdir()
    for file in (panel / "train").iterdir():
        train = pd.read_parquet(file)
        if file.name == "2.parquet":
            train.loc[(train["shop"] == "c").idxmax(), "x"] = np.inf
        train.to_parquet(tmp_path / "bad" / file.name, index=False)
    rows = pd.read_parquet(tmp_path / "bad").query("shop == 'c'")["x"]
    row = 1 + rows.tolist().index(np.inf)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-00000.parquet").write_text("of an earlier run")
    command = f"--train {tmp_path}/bad --keep id --too-few nan --out {tmp_path}/out"

    result = predict(command)
    assert result.exit_code == 2
    reason = f"group 'c': {tmp_path}/bad (rows of group 'c'): column 'x' is infinite in row {row};"
    assert reason in result.stderr and "left out by --on-error skip" in result.stderr
    assert (tmp_path / "out" / "part-00000.parquet").read_text() == "of an earlier run"

    result = predict(f"{command} --on-error skip")
    assert result.exit_code == 0, result.output
    assert f"No prediction for {reason}" in result.stderr
    expected = expected.drop(columns="q0.1").copy()
    expected.loc[expected["shop"] == "c", "prediction"] = np.nan
    assert_same(pd.read_parquet(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--out out --keep id", "1 of 13 groups in test have fewer than 2 train rows: 'z' (0)"),
        ("--out out --keep nothing", "--keep: test has no column 'nothing'"),
        ("--out out --too-few nan", "nothing names the rows of test"),
        ("--out out --keep id --by x", "groups are text or whole numbers"),
        ("--out out --keep id --too-few pooled", "--too-few pooled needs all train rows in one process"),
        ("--out out --keep id --train train.parquet", "--train train.parquet is no folder"),
        ("--out train --keep id", "--out train would be a part of --train train"),
        ("--out test/answers --keep id", "--out test/answers would be a part of --test test"),
        ("--out . --keep id", "is a folder with something else than predictions"),
        ("--out out --keep id --dask tcp://127.0.0.1:9", "no Dask scheduler answers at tcp://127.0.0.1:9"),
        ("--out out.csv --train train.parquet --test test.parquet --dask 127.0.0.1", "no Dask scheduler answers"),
    ],
)
def test_refused_folders(predict, panel, command, message, monkeypatch):
    monkeypatch.setattr(cluster, "_PATIENCE", 1)
    result = predict(command)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr and not (panel / "out").exists()


# ---- Lost workers, last: others take seconds to import what they need ------------------------------


def test_a_worker_that_is_killed_while_folders_are_predicted(client, panel, expected, tmp_path):
    killed = []

    def begin(stage, total):
        def done(count):
            if stage == "Predicting" and not killed and count < total:
                killed.append(next(iter(client.run(os.getpid).values())))
                os.kill(killed[0], signal.SIGKILL)

        return done

    options = PredictOptions(
        panel / "train",
        panel / "test",
        "y",
        tmp_path / "out",
        "shop",
        quantiles="0.1",
        retrofit=panel / "closed-v3.safetensors",
        too_few="nan",
        precision="float64",
        device="cpu",
        keep=["id"],
        dask=client.scheduler.address,
    )
    predicted = predict_files(options, begin=begin)
    assert killed and "Predicted 94 of 96 rows." in predicted.lines
    assert_same(pd.read_parquet(tmp_path / "out"), expected)


def test_a_killed_worker_costs_nothing(client, tmp_path):
    def killed_once(i):
        if i == 5 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    assert sorted(on(client, killed_once, range(20))) == [(i, i) for i in range(20)]
    assert (tmp_path / "killed").exists()


def test_a_memory_limit_that_is_hit_again_and_again(client):
    def greedy(_):
        held = np.ones(2**32 // 8)  # twice what a worker may have
        time.sleep(60)
        return held.sum()

    with pytest.raises(MemoryError, match="2 workers of the cluster were killed at the same work, "):
        list(on(client, greedy, [0]))
    assert dict(on(client, lambda i: i, [3])) == {0: 3}  # the cluster lives on
