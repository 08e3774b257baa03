"""Decoding many tables at once: bit for bit what TabPFN decodes member by member."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from tabpfn import TabPFNRegressor

from oretrofit import patch
from oretrofit.retrofit.ragged import passes, predicting, predictor, preparing

LEVELS = [0.05, 0.5, 0.9]
TRANSFORMS = {
    "none": (None,),
    "default": (None, "safepower"),
    "all transformed": ("quantile_norm", "safepower"),
    "three": (None, "quantile_uni", "safepower"),
}
OPTIONS = {
    "plain": {},
    "temperature": {"softmax_temperature": 0.5},
    "before the softmax": {"average_before_softmax": True, "softmax_temperature": 1.3},
}


@pytest.fixture(scope="module")
def closed(tiny_host):
    return patch(tiny_host, "closed", tau=1e-6)


def a_table(seed, rows, test_rows, skew):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows + test_rows, 3))
    y = np.exp(skew * X[:rows, 0]) + 0.1 * rng.standard_normal(rows) - 40
    return X[:rows], y, X[rows:]


TABLES = [a_table(0, 12, 3, 0.1), a_table(1, 40, 7, 2.0), a_table(2, 9, 1, 8.0), a_table(3, 30, 5, 1.0)]


def the_decoding(closed, transforms, **options):
    """A predictor, its tables, and what TabPFN's own regressors are when they have been fitted on the same."""
    config = {"REGRESSION_Y_PREPROCESS_TRANSFORMS": transforms}
    options |= {"device": "cpu", "inference_precision": torch.float32, "n_estimators": 5, "inference_config": config}
    made = predictor.TablePredictor(closed.specs, options, None, max_padding=0.2)
    jobs = [preparing.Job(7, *table) for table in TABLES]
    tables = [preparing.prepare(job, made.job_options, None) for job in jobs]
    own = []
    for X, y, _ in TABLES:
        own.append(TabPFNRegressor(model_path=closed.specs, random_state=7, **options).fit(X, y))
    return made, [pickle.loads(pickle.dumps(table)) for table in tables], own


def a_batch(tables, buckets, dtype, seed=0):
    """All members in any order, with logits of which some are far below the others; garbage where there is no row."""
    rng = np.random.default_rng(seed)
    members = [
        (dataclasses.replace(member, table=index), number)
        for index, table in enumerate(tables)
        for number, member in enumerate(table.members)
    ]
    members = [members[i] for i in rng.permutation(len(members))]
    rows = max(member.size[1] for member, _ in members)
    logits = torch.from_numpy(6 * rng.standard_normal((rows, len(members), buckets))).to(dtype)
    for i, (member, _) in enumerate(members):
        logits[member.size[1] :, i] = torch.nan
    return members, logits


def by_tabpfn(own, members, logits, index):
    """A table's sum, by TabPFN's own code: member by member in the order of the batch."""
    regressor, total = own[index], None
    borders = regressor.znorm_space_bardist_.borders
    for i, (member, number) in enumerate(members):
        if member.table == index:
            config = regressor.executor_.ensemble_members[number].config
            found = regressor._translate_batched_logits(
                output=logits[: member.size[1], i], config=config, znorm_borders=borders, std_borders=borders.numpy()
            )
            total = found if total is None else total + found
    return total


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_a_batch_is_decoded_as_by_tabpfn(closed, transforms, options, monkeypatch):
    made, tables, own = the_decoding(closed, TRANSFORMS[transforms], **OPTIONS[options])
    for dtype, at_once in ((torch.float32, 1000), (torch.bfloat16, None), (torch.float64, None), (torch.float32, None)):
        if at_once is not None:
            monkeypatch.setattr(passes, "_MOST_LOGITS", at_once)
        members, logits = a_batch(tables, closed.model.n_out, dtype)
        half = len(members) // 2  # tables lie in two batches
        totals = {}
        for part in (slice(0, half), slice(half, None)):
            totals |= made._passes._add([member for member, _ in members[part]], logits[:, part], totals)
        assert set(totals) == set(range(len(tables)))
        for index in totals:
            assert torch.equal(totals[index], by_tabpfn(own, members, logits, index))
            assert totals[index].untyped_storage().nbytes() == totals[index].nbytes  # no view that keeps a batch alive
        monkeypatch.undo()
    transformed = [member.translation is not None for member, _ in members]
    assert any(transformed) == (transforms != "none") and all(transformed) == (transforms == "all transformed")
    for index, (table, regressor) in enumerate(zip(tables, own, strict=True)):
        for output_type in predicting.OUTPUT_TYPES:
            rows = len(totals[index])
            actual = predicting._decode(made.template, table, totals[index], rows, output_type, LEVELS)
            expected = regressor._decode_batched_dataset(
                accumulated_logits=totals[index],
                n_estimators=5,
                raw_space_bardist=regressor.raw_space_bardist_,
                znorm_space_bardist=regressor.znorm_space_bardist_,
                y_mean=regressor.y_train_mean_,
                y_std=regressor.y_train_std_,
                output_type=output_type,
                quantiles=LEVELS,
            )
            same(actual, expected)


def same(actual, expected):
    """Equal to the bit, types included."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            same(actual[name], expected[name])
    elif isinstance(expected, list):
        for a, b in zip(actual, expected, strict=True):
            same(a, b)
    elif isinstance(expected, torch.nn.Module):
        same(actual.borders, expected.borders)
    else:
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_logits_that_count_for_nothing(closed):
    """Borders that a transform cannot be undone at are left out, and this is met here."""
    _, tables, _ = the_decoding(closed, ("safepower",))
    left_out = [member.translation.left_out for table in tables for member in table.members]
    assert any(mask is not None and mask.any() for mask in left_out)
    assert any(mask is None for mask in left_out)


def test_members_of_one_transform_share_its_translation(closed):
    """Also behind a process."""
    _, tables, _ = the_decoding(closed, (None, "quantile_uni", "safepower"))
    for table in tables:
        assert len({id(member.translation) for member in table.members}) == 3
