"""OFT's maths: PEFT's conventions, published numbers, closed forms in float64, and the block-wise product."""

import pytest
import torch
from peft.tuners.oft.layer import OFTRotationModule

from orbit_cli.adapters import oft

GOLDEN_V = [[0.1, 0.2, -0.1, 0.05, 0.0, 0.3], [0.02, -0.04, 0.06, 0.01, -0.03, 0.05]]
GOLDEN_Y = {
    5: [1.711418, 4.339674, 6.967931, 9.596187],
    6: [1.713524, 4.343270, 6.973018, 9.602764],
    12: [1.712992, 4.341143, 6.969295, 9.597445],
}


def random_vectors(blocks: int, b: int, largest: float, seed: int = 0) -> torch.Tensor:
    """float64 skew vectors whose Q have spectral norms up to `largest`."""
    vectors = torch.randn(blocks, b * (b - 1) // 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    norms = torch.linalg.matrix_norm(oft.skew(vectors, b), 2)
    scale = torch.linspace(0.1, 1.0, blocks, dtype=torch.float64) * largest
    return vectors * (scale / norms)[:, None]


@pytest.mark.parametrize("terms", GOLDEN_Y)
def test_golden_example(terms):
    v = torch.tensor(GOLDEN_V, dtype=torch.float64)
    weight = torch.arange(32, dtype=torch.float64).reshape(4, 8) / 10
    x = torch.arange(8, dtype=torch.float64) / 8
    rotations = oft.cayley_neumann(v, 4, terms)
    y = oft.rotate(x, rotations) @ weight.t()
    assert torch.allclose(y, torch.tensor(GOLDEN_Y[terms], dtype=torch.float64), atol=1e-6)
    wrong_side = oft.rotate(x, rotations.transpose(1, 2)) @ weight.t()
    assert not torch.allclose(y, wrong_side, atol=1e-2)


def test_golden_rotation_row_and_row_norms():
    rotations = oft.cayley_neumann(torch.tensor(GOLDEN_V, dtype=torch.float64), 4, 5)
    row = torch.tensor([0.888525, 0.166025, 0.403662, -0.056150], dtype=torch.float64)
    assert torch.allclose(rotations[0, 0], row, atol=1e-6)
    weight = torch.arange(32, dtype=torch.float64).reshape(4, 8) / 10
    merged = oft.rotate(weight, rotations.transpose(1, 2))  # W R^T
    norms = torch.tensor([1.181807, 3.312799, 5.546687, 7.795511], dtype=torch.float64)
    assert torch.allclose(merged.norm(dim=1), norms, atol=1e-6)


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 6, 7, 10])
def test_series_equals_closed_form(terms):
    b = 8
    vectors = random_vectors(6, b, 0.6)
    q, eye, n = oft.skew(vectors, b), torch.eye(b, dtype=torch.float64), oft.neumann_power(terms)
    if terms == 1:
        expected = eye.expand_as(q)
    elif terms == 2:
        expected = eye + 2 * q
    else:
        expected = (eye + q) @ torch.linalg.inv(eye - q) @ (eye - torch.linalg.matrix_power(q, n))
    assert torch.allclose(oft.cayley_neumann(vectors, b, terms), expected, atol=1e-13)


def test_three_terms_are_four_as_in_peft():
    vectors = random_vectors(3, 4, 0.5)
    assert torch.equal(oft.cayley_neumann(vectors, 4, 3), oft.cayley_neumann(vectors, 4, 4))


def test_matches_peft_function():
    for terms in (2, 3, 5, 6, 8):
        vectors = random_vectors(5, 16, 0.4, seed=terms).float()
        module = OFTRotationModule(5, vectors.shape[1], 16, 80, num_cayley_neumann_terms=terms)
        expected = module._cayley_batch(vectors, 16, True, terms)
        assert torch.allclose(oft.cayley_neumann(vectors, 16, terms), expected, atol=1e-6)


@pytest.mark.parametrize(("terms", "published"), [(4, 1.75e-3), (5, 2.89e-2), (6, 2.6e-5), (8, 3.7e-7)])
def test_orthogonality_error_is_the_closed_form(terms, published):
    b = 32
    vectors = random_vectors(4, b, 0.347)
    n = oft.neumann_power(terms)
    mu = torch.linalg.svdvals(oft.skew(vectors, b))  # |eigenvalues| of Q, which are +-i mu
    cross = 0.0 if n % 2 else 2 * (-1) ** (n // 2)
    expected = (mu ** (2 * n) - cross * mu**n).abs().amax(1)
    rotations = oft.cayley_neumann(vectors, b, terms)
    assert torch.allclose(oft.orthogonality_error(rotations), expected, rtol=1e-6, atol=1e-13)
    assert oft.max_orthogonality_error(rotations) == pytest.approx(float(expected.max()), rel=1e-6)
    assert oft.max_orthogonality_error(rotations) == pytest.approx(published, rel=0.05)


def test_largest_lambda_is_exact_over_many_blocks():
    vectors = random_vectors(300, 8, 0.7)[torch.randperm(300, generator=torch.Generator().manual_seed(3))]
    exact = torch.linalg.matrix_norm(oft.skew(vectors, 8), 2).max()
    assert oft.max_lambda(vectors, 8) == pytest.approx(float(exact), rel=1e-12)
    assert oft.max_lambda(vectors[:0], 8) == 0.0


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (24,)])
def test_rotate_and_its_gradients(shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    rotations = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(oft.rotate(x, rotations), x @ torch.block_diag(*rotations), atol=1e-12)
    assert torch.autograd.gradcheck(oft.rotate, (x, rotations))


def test_rotate_takes_strided_input():
    x = torch.randn(6, 4, 2).transpose(0, 1).reshape(4, 12)[:, ::1].t().contiguous().t()
    rotations = torch.randn(3, 4, 4)
    assert torch.allclose(oft.rotate(x, rotations), x @ torch.block_diag(*rotations), atol=1e-5)


def test_identity_rotation_is_bitwise_nothing():
    x = torch.randn(7, 64)
    rotations = oft.cayley_neumann(torch.zeros(2, 32 * 31 // 2), 32, 6)
    assert torch.equal(oft.rotate(x, rotations), x)
    assert torch.equal(oft.rotate(x.bfloat16(), rotations), x.bfloat16())


def test_gradient_of_the_series():
    vectors = random_vectors(2, 4, 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: oft.cayley_neumann(v, 4, 6), (vectors,))
