"""Short names: as short as they tell things apart."""

from __future__ import annotations

from oretrofit.experiments.style import short_datasets
from oretrofit.patches.tabpfn_v3_host import TABPFN_V3


def test_datasets_that_would_coincide_keep_the_folders_that_tell_them_apart() -> None:
    specs = ["csv:/data/c1/train.csv#medv", "csv:/data/c2/train.csv#medv", "csv:/data/c2/train.csv#age", "ames"]
    assert list(short_datasets(specs).values()) == ["c1/train.csv#medv", "c2/train.csv#medv", "train.csv#age", "ames"]
    specs = ["csv:a/x/t.csv#y", "csv:b/x/t.csv#y", "csv:b/z/t.csv#y", "openml:1"]
    assert list(short_datasets(specs).values()) == ["a/x/t.csv#y", "b/x/t.csv#y", "z/t.csv#y", "openml:1"]
    assert short_datasets(["csv:t.csv#y", "csv:./t.csv#y"]) == {
        "csv:t.csv#y": "csv:t.csv#y",
        "csv:./t.csv#y": "csv:./t.csv#y",
    }
    assert short_datasets([]) == {}
    assert short_datasets(["csv:caf\udce9.csv#y"]) == {"csv:caf\udce9.csv#y": "caf\\udce9.csv#y"}


def test_tables_of_packages_go_by_their_own_names() -> None:
    specs = ["rdata:AER/wages", "rdata:HLMdiag/wages", "rdata:openintro/cars", "cars", "rdata:plm/Parity"]
    assert list(short_datasets(specs).values()) == [*specs[:4], "Parity"]


def test_targets_are_whole() -> None:
    assert short_datasets(["csv:/far/away/homes.csv#price/sqft"]) == {
        "csv:/far/away/homes.csv#price/sqft": "homes.csv#price/sqft"
    }


def test_sites() -> None:
    name = "feature_distribution_embedder.layers.0.cross_attn_block1.layernorm_kv"
    assert TABPFN_V3.shorten(name) == "emb.0.ca1.ln_kv"


def test_a_name_is_one_line() -> None:
    spec = "csv:a/t.csv#new\nline\tof"
    assert short_datasets([spec]) == {spec: r"t.csv#new\nline\tof"}
