"""Muon against its formula on singular values, in float64."""

import numpy as np
import pytest
import torch

from oretrofit.experiments.muon import Muon, orthogonalized


def by_svd(m_AB: np.ndarray) -> np.ndarray:
    """Four quintic iterations, each of which acts on every singular value by itself."""
    u, s, v = np.linalg.svd(m_AB, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(4):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ v


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5), (5, 1)])
def test_iterations_act_on_singular_values(shape):
    m_AB = torch.from_numpy(np.random.default_rng(0).standard_normal(shape))
    torch.testing.assert_close(orthogonalized(m_AB), torch.from_numpy(by_svd(m_AB.numpy())), rtol=0, atol=1e-11)


def test_nothing_to_orthogonalise_is_nothing():
    assert torch.equal(orthogonalized(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_steps_are_those_of_the_formula():
    rng = np.random.default_rng(1)
    p_AB, gradients = rng.standard_normal((4, 10)), rng.standard_normal((3, 4, 10))
    parameter = torch.nn.Parameter(torch.from_numpy(p_AB))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.01)
    expected, momentum = p_AB.copy(), np.zeros_like(p_AB)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = by_svd(0.05 * gradient + 0.95 * momentum)
        expected = (1 - 0.1 * 0.01) * expected - 0.1 * 0.2 * np.sqrt(10) * update
    torch.testing.assert_close(parameter.detach(), torch.from_numpy(expected), rtol=0, atol=1e-11)
