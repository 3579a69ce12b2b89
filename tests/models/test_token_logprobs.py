"""token_logprobs against float64 references and published numbers, and its promise about memory."""

import pytest
import torch

from orbit_cli.trainer.logprobs import token_logprobs

GOLDEN = {
    1.0: (-0.407606, 0.832396),
    0.5: (-0.142932, 0.441057),
    1.5: (-0.574935, 0.965332),
    0.6: (-0.202573, 0.556749),
}


@pytest.mark.parametrize("temperature", GOLDEN)
def test_golden_logprob_and_entropy(temperature):
    hidden = torch.tensor([[2.0, 1.0, 0.0]])
    logprobs, entropy = token_logprobs(hidden, torch.eye(3), torch.tensor([0]), temperature, 8, with_entropy=True)
    assert float(logprobs) == pytest.approx(GOLDEN[temperature][0], abs=1e-6)
    assert float(entropy) == pytest.approx(GOLDEN[temperature][1], abs=1e-6)


def test_golden_entropy_gradient():
    hidden = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    _, entropy = token_logprobs(hidden, torch.eye(3), torch.tensor([0]), 1.0, 8, with_entropy=True)
    entropy.sum().backward()
    assert torch.allclose(hidden.grad, torch.tensor([[-0.282587, 0.140770, 0.141817]]), atol=1e-6)


def reference(hidden, weight, targets, temperature):
    logp = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_against_float64(chunk, temperature):
    generator = torch.Generator().manual_seed(chunk)
    hidden = torch.randn(20, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator) * 2
    targets = torch.randint(0, 50, (20,), generator=generator)
    up = torch.randn(2, 20, generator=generator)
    ours = hidden.clone().requires_grad_()
    exact = hidden.double().requires_grad_()
    logprobs, entropy = token_logprobs(ours, weight, targets, temperature, chunk, with_entropy=True)
    exact_logprobs, exact_entropy = reference(exact, weight.double(), targets, temperature)
    assert logprobs.dtype is torch.float32
    assert torch.allclose(logprobs.double(), exact_logprobs, atol=2e-5)
    assert torch.allclose(entropy.double(), exact_entropy, atol=2e-5)
    (logprobs * up[0] + entropy * up[1]).sum().backward()
    (exact_logprobs * up[0].double() + exact_entropy * up[1].double()).sum().backward()
    assert (ours.grad - exact.grad).norm() <= 1e-5 * exact.grad.norm()


def test_gradient_of_logprobs_alone_with_and_without_entropy():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(30, 8, generator=generator)
    targets = torch.randint(0, 30, (6,), generator=generator)
    gradients = []
    for with_entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        token_logprobs(leaf, weight, targets, 1.0, 4, with_entropy)[0].sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_log_ratio_of_a_hundred_stays_finite():
    hidden = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, torch.eye(3), torch.tensor([2]), 1.0, 1, with_entropy=True)
    assert float(logprobs.detach()) == -400.0
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_hidden_states_get_a_float32_softmax():
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(9, 32, generator=generator) * 3).bfloat16()
    weight = torch.randn(100, 32, generator=generator).bfloat16()
    targets = torch.randint(0, 100, (9,), generator=generator)
    logprobs, _ = token_logprobs(hidden, weight, targets, 1.0, 4)
    exact, _ = reference(hidden.double(), weight.double(), targets, 1.0)
    assert torch.allclose(logprobs.double(), exact, atol=1e-4)


def test_logits_of_one_chunk_exist_at_a_time():
    """Largest tensor made anywhere in forward and backward: one chunk of the vocabulary, never the batch's logits."""
    tokens, width, vocabulary, chunk = 64, 2, 1000, 4
    largest = _LargestTensor()
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width)
    with largest:
        targets = torch.zeros(tokens, dtype=torch.long)
        logprobs, entropy = token_logprobs(hidden, weight, targets, 0.9, chunk, with_entropy=True)
        (logprobs + entropy).sum().backward()
    assert largest.elements == chunk * vocabulary


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_greedy_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprobs(torch.zeros(1, 2), torch.eye(2), torch.tensor([0]), 0, 1)


def test_no_tokens_at_all():
    hidden = torch.zeros(0, 4, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.long), 1.0, 4, True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
