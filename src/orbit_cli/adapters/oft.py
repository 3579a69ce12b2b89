"""OFT: block-diagonal rotation of a linear's input, y = (x R) W^T (2306.07280; Cayley-Neumann: OFTv2, 2506.19847).

Conventions are PEFT's: the skew vector is the upper triangle row by row, Q[i, j] = +v and Q[j, i] = -v; with N terms
R = I + 2Q + ... + 2Q^(n-1) + Q^n, n = max(N - 1, 3) for N >= 3, which equals (I + Q)(I - Q)^-1 (I - Q^n).
Everything here is float32 or wider; rounding to BF16 is the bank's. PEFT's exact branch (use_cayley_neumann=False)
turns the other way and is left out, as are COFT, block_share and module_dropout.

Shape letters: n blocks, b block size, p = b(b-1)/2, T tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from orbit_kernels.leaves import operand


@lru_cache(maxsize=32)
def _triangle(block_size: int, device: torch.device) -> Tensor:
    """Flat positions of the upper triangle in a b x b matrix, row by row. [p] int64"""
    rows, columns = torch.triu_indices(block_size, block_size, 1, device=device)
    return rows * block_size + columns


def skew(vectors: Tensor, block_size: int) -> Tensor:
    """Skew-symmetric Q [n, b, b] from its vectors [n, p]; differentiable."""
    n = vectors.shape[0]
    upper = vectors.new_zeros(n, block_size * block_size)  # [n, b*b]
    upper = upper.index_copy(1, _triangle(block_size, vectors.device), vectors).view(n, block_size, block_size)
    return upper - upper.transpose(1, 2)


def neumann_power(terms: int) -> int:
    """The highest power n of Q that PEFT's `num_cayley_neumann_terms` = terms leaves in the series."""
    return terms - 1 if terms <= 2 else max(terms - 1, 3)


def cayley_neumann(vectors: Tensor, block_size: int, terms: int) -> Tensor:
    """Rotations R [n, b, b] from skew vectors [n, p], in the vectors' dtype; differentiable."""
    q = skew(vectors, block_size)
    eye = torch.eye(block_size, dtype=q.dtype, device=q.device)
    last = neumann_power(terms)
    if last == 0:
        return eye.expand_as(q).clone()
    result = eye + 2.0 * q
    power = q
    for exponent in range(2, last + 1):
        power = torch.bmm(power, q)
        result = torch.add(result, power, alpha=1.0 if exponent == last else 2.0)
    return result


def orthogonality_error(rotations: Tensor) -> Tensor:
    """Spectral norm of R R^T - I for each block. [n, b, b] -> [n]; singular values: slow, for reports and tests."""
    return torch.linalg.matrix_norm(_defect(rotations), 2)


def max_orthogonality_error(rotations: Tensor) -> float:
    """The largest `orthogonality_error` of all blocks, exact but with few singular value decompositions."""
    defect = _defect(rotations)
    return _largest_spectral_norm(defect, torch.linalg.matrix_norm(defect))


def max_lambda(vectors: Tensor, block_size: int) -> float:
    """The largest spectral norm of all Q. The series needs it below 1: beyond, R diverges."""
    # Singular values of a skew matrix come in pairs, so ||Q||_2 <= ||Q||_F / sqrt(2) = the norm of its vector.
    return _largest_spectral_norm(skew(vectors, block_size), torch.linalg.vector_norm(vectors, dim=1))


def _defect(rotations: Tensor) -> Tensor:
    product = torch.bmm(rotations, rotations.transpose(1, 2))
    return product - torch.eye(rotations.shape[-1], dtype=rotations.dtype, device=rotations.device)


def _largest_spectral_norm(matrices: Tensor, bounds: Tensor) -> float:
    """Largest 2-norm of matrices [n, b, b] given upper bounds [n]: only blocks whose bound can win are decomposed."""
    if not len(matrices):
        return 0.0
    first = torch.topk(bounds, min(16, len(bounds))).indices
    best = torch.linalg.matrix_norm(matrices[first], 2).max()
    rest = bounds > best
    rest[first] = False
    if rest.any():
        best = torch.maximum(best, torch.linalg.matrix_norm(matrices[rest], 2).max())
    return float(best)


class _Rotate(torch.autograd.Function):
    """x [T, n*b] times blockdiag(R [n, b, b]), as batched products on views: inputs are never copied."""

    @staticmethod
    def forward(ctx, x: Tensor, rotations: Tensor) -> Tensor:
        ctx.save_for_backward(x, rotations)
        return _blockwise(x, rotations)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, rotations = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _blockwise(grad, rotations.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        grad_r = None
        if ctx.needs_input_grad[1]:
            grad_r = torch.bmm(_blocks(x, rotations).transpose(1, 2), _blocks(grad, rotations))  # [n, b, b]
        return grad_x, grad_r


def _blocks(x: Tensor, rotations: Tensor) -> Tensor:
    """[T, n*b] as a strided view [n, T, b]."""
    return x.view(x.shape[0], rotations.shape[0], rotations.shape[1]).transpose(0, 1)


def _blockwise(x: Tensor, rotations: Tensor) -> Tensor:
    # Copying the product into place is faster than `out=` on the strided view (1.1 to 1.9 times on an AVX2 CPU).
    return torch.bmm(_blocks(x, rotations), rotations).transpose(0, 1).reshape(x.shape)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """x [..., n*b] times blockdiag(R [n, b, b]); R is cast to x's dtype (exact for BF16-valued R in BF16 or FP32)."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # [T, n*b]
    return _Rotate.apply(flat, operand(rotations, x.dtype)).view(x.shape)
