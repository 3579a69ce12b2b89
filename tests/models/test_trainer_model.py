"""Log-probs and adapter gradients of the trainer's model, against autograd through merged float64 weights."""

import re

import pytest
import torch
from tiny_checkpoints import ARCHITECTURES, MOE, build, load_dense, random_model, spec_for, write_checkpoint

from orbit_cli.adapters.oft import cayley_neumann
from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.models.layout import Cost, plan
from orbit_cli.models.model import TrainerModel


class MostRows(Cost):
    """Makes one row per sequence the cheapest layout."""

    def of(self, rows: int, length: int) -> float:
        return -rows


class FewestRows(Cost):
    """Makes a row per prompt the cheapest layout."""

    def of(self, rows: int, length: int) -> float:
        return rows


ROWS, SHARED = MostRows(token=1.0, pair=1.0), FewestRows(token=1.0, pair=1.0)


def make_batch(seed: int = 0, *, prompts: int = 2, group: int = 3, width: int = 16):
    """Groups of samples of one prompt, of different lengths, with a hole in one mask (a tool's answer)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(prompts * group, width, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    lengths = torch.zeros(len(ids), dtype=torch.int64)
    for row in range(len(ids)):
        prompt = 3 + row // group * 2
        if row % group == 0:
            tokens = torch.randint(2, 96, (prompt,), generator=generator)
        end = min(prompt + 1 + int(torch.randint(1, 8, (1,), generator=generator)), width)
        ids[row, :prompt] = tokens
        ids[row, prompt:end] = torch.randint(2, 96, (end - prompt,), generator=generator)
        mask[row, prompt:end] = True
        lengths[row] = end
    mask[1, make_hole(mask[1])] = False
    return ids, lengths, mask


def make_hole(row: torch.Tensor) -> int:
    return int(row.nonzero()[1])


def dense_logprobs(model, ids, lengths, mask, temperature):
    """One sequence at a time, no padding, full float64 log-softmax."""
    result = torch.zeros(ids.shape, dtype=torch.float64)
    entropy = torch.zeros_like(result)
    rows = []
    for row, length in enumerate(lengths.tolist()):
        logp = torch.log_softmax(model(ids[row : row + 1, :length], use_cache=False).logits[0] / temperature, -1)
        scores = logp[:-1].gather(1, ids[row, 1:length, None])[:, 0]
        pad = ids.shape[1] - length
        rows.append(torch.nn.functional.pad(scores, (1, pad)))
        entropy[row, 1:length] = -(logp.exp() * logp).sum(-1)[:-1].detach()
    return torch.where(mask, torch.stack(rows), result), torch.where(mask, entropy, 0.0)


def merge(reference, model: TrainerModel) -> dict[str, torch.Tensor]:
    """Merged float64 weights as functions of float64 leaves, put in place of the reference's; returns the leaves."""
    spec, leaves, merged = model.bank.spec, {}, {}
    base = dense_state(reference)
    for name, tensor in model.bank.named_state().items():
        leaves[name] = tensor.detach().double().requires_grad_()
    shipped = model.bank.version(0).tensors
    for site in model.adapted:
        for path in site.paths:
            if site.projection == "gate_up_proj":
                exact = cayley_neumann(leaves[path + ".oft_skew"], spec.block_size, spec.neumann_terms)
                rotation = torch.block_diag(*straight_through(exact, shipped[path + ".oft_R"]))
                turn_input(reference.get_submodule(path.removesuffix(".gate_up_proj")), rotation)
                continue
            weight = base[path + ".weight"]
            if spec.kind == "oft":
                exact = cayley_neumann(leaves[path + ".oft_skew"], spec.block_size, spec.neumann_terms)
                rotation = torch.block_diag(*straight_through(exact, shipped[path + ".oft_R"]))
                merged[path + ".weight"] = weight @ rotation.t()
            else:
                a = straight_through(leaves[path + ".lora_A"], shipped[path + ".lora_A"])
                b = straight_through(leaves[path + ".lora_B"], shipped[path + ".lora_B"])
                merged[path + ".weight"] = weight + spec.scaling * b @ a
    install(reference, merged)
    return leaves


def turn_input(experts, rotation: torch.Tensor) -> None:
    """Every expert gets x R and the routing that x has; the router's weights are constants."""
    forward = experts.forward
    experts.forward = lambda x, ids, weights: forward(x @ rotation, ids, weights.detach())


def straight_through(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    return exact + (rounded.double() - exact).detach()


def dense_state(reference) -> dict[str, torch.Tensor]:
    state = {}
    for name, tensor in reference.state_dict().items():
        fused = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
        for expert, weight in enumerate(tensor) if fused else ():
            if fused[2] == "down_proj":
                state[f"{fused[1]}.{expert}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                state[f"{fused[1]}.{expert}.gate_proj.weight"] = gate
                state[f"{fused[1]}.{expert}.up_proj.weight"] = up
        if not fused:
            state[name] = tensor
    return state


def install(reference, merged: dict[str, torch.Tensor]) -> None:
    """Replace parameters by non-leaf tensors; experts are stacked again."""
    experts: dict[str, dict] = {}
    for name, tensor in merged.items():
        path = name.removesuffix(".weight")
        expert = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)", path)
        if expert:
            experts.setdefault(expert[1], {})[int(expert[2]), expert[3]] = tensor
        else:
            module = reference.get_submodule(path)
            del module._parameters["weight"]
            module.weight = tensor
    for path, parts in experts.items():
        module = reference.get_submodule(path)
        count = range(module.num_experts)
        stacks = {
            "gate_up_proj": torch.stack([torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in count]),
            "down_proj": torch.stack([parts[e, "down_proj"] for e in count]),
        }
        for name, stack in stacks.items():
            del module._parameters[name]
            setattr(module, name, stack)
        forward = module.forward
        module.forward = lambda x, ids, weights, forward=forward: forward(x, ids, weights.detach())


def test_a_shared_prompt_is_computed_once():
    """Two groups of three: one row per prompt, the last token of a sequence never an input."""
    ids, lengths, mask = make_batch()
    rows, shared = plan(ids, lengths, mask, ROWS), plan(ids, lengths, mask, SHARED)
    assert rows.input_ids.shape == (6, int(lengths.max()) - 1)
    longest = max(3 + int((lengths[:3] - 4).sum()), 5 + int((lengths[3:] - 6).sum()))
    assert shared.input_ids.shape == (2, longest)
    assert rows.targets.equal(shared.targets) and len(rows.targets) == int(mask.sum())
    per_token = plan(ids, lengths, mask, Cost(token=1.0, pair=0.0))
    assert per_token.tokens == min(rows.tokens, shared.tokens, per_token.tokens)
    long_mask = torch.arange(40)[None].expand(6, -1) >= 2  # long responses to a short prompt: attention decides
    attention_bound = plan(torch.full((6, 40), 7), torch.full((6,), 40), long_mask, Cost(token=0.0, pair=1.0))
    assert attention_bound.input_ids.shape == (6, 39)
    alone = plan(ids[:1], lengths[:1], mask[:1], ROWS)
    assert alone.attention_mask is None and rows.attention_mask is not None


EVERY_KIND = [(model_type, kind) for model_type in ARCHITECTURES for kind in ("oft", "lora")]


@pytest.mark.parametrize("cost", [ROWS, SHARED], ids=["rows", "shared"])
@pytest.mark.parametrize(("model_type", "kind"), EVERY_KIND + [(model_type, "shared") for model_type in MOE])
def test_logprobs_and_gradients_against_merged_float64(model_type, kind, cost, tmp_path):
    reference = write_checkpoint(tmp_path, random_model(model_type), NumberFormat.int4)
    reference.set_experts_implementation("eager")
    model = build(tmp_path, spec_for(model_type, kind), scale=0.1 if kind == "lora" else 0.05)
    model.cost = cost
    ids, lengths, mask = make_batch()
    up = torch.randn(ids.shape, generator=torch.Generator().manual_seed(3))
    leaves = merge(reference.double(), model)
    wanted, wanted_entropy = dense_logprobs(reference, ids, lengths, mask, 0.8)
    (wanted * up.double()).sum().backward()

    found, entropy = model.logprobs(ids, lengths, mask, temperature=0.8, chunk=5, with_entropy=True)
    (found * up).sum().backward()
    model.bank.pull_back()

    assert found.dtype is torch.float32
    assert not found[~mask].any() and not entropy[~mask].any()
    assert (found.double() - wanted).abs().max() < 2e-5
    assert (entropy.double() - wanted_entropy).abs().max() < 2e-5
    compared = 0
    masters = {part.name: part for part in model.bank.parts.values()}
    for part in masters.values():
        for path, grad in part._per_path(part.master.grad, compute=False):
            exact = leaves[f"{path}.{part.state_name}"].grad
            scale = max(float(exact.norm()), 1e-3)
            assert float((grad.double() - exact).norm()) <= 2e-4 * scale, path
            compared += int(exact.norm() > 1e-3)
    assert compared >= 10


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_padding_width_order_and_sharing_change_nothing(model_type, tmp_path):
    write_checkpoint(tmp_path, random_model(model_type), NumberFormat.int4)
    model = build(tmp_path, spec_for(model_type, "oft"), scale=0.05)
    ids, lengths, mask = make_batch()

    def run(ids, lengths, mask, cost):
        model.cost = cost
        model.bank.zero_grad()
        logprobs, _ = model.logprobs(ids, lengths, mask, temperature=1.0, chunk=64)
        logprobs.sum().backward()
        model.bank.pull_back()
        return logprobs.detach(), model.bank.parameters()[0].grad.clone()

    reference, gradient = run(ids, lengths, mask, ROWS)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    wider = [torch.nn.functional.pad(t, (0, 21)) for t in (ids, mask)]
    junk = ids.clone()
    junk[torch.arange(ids.shape[1])[None] >= lengths[:, None]] = 77  # what padding holds must not matter
    for name, arguments, back in [
        ("shared", (ids, lengths, mask, SHARED), slice(None)),
        ("wider", (wider[0], lengths, wider[1], ROWS), slice(None)),
        ("order", (ids[order], lengths[order], mask[order], SHARED), order.argsort()),
        ("junk", (junk, lengths, mask, ROWS), slice(None)),
    ]:
        found, other = run(*arguments)
        assert (found[back][:, : ids.shape[1]] - reference).abs().max() <= 1e-5 * reference.abs().max(), name
        assert (other - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("kind", ["oft", "lora"])
def test_micro_batches_change_nothing(kind, tmp_path):
    write_checkpoint(tmp_path, random_model("qwen3_moe"), NumberFormat.int4)
    ids, lengths, mask = make_batch()
    gradients = []
    for splits in ([6], [3, 3], [1, 2, 3], [1] * 6):
        model = build(tmp_path, spec_for("qwen3_moe", kind), scale=0.05)
        for part in torch.arange(6).split(splits):
            logprobs, _ = model.logprobs(ids[part], lengths[part], mask[part], temperature=1.0, chunk=3)
            (logprobs.sum() / mask.sum()).backward()
        model.bank.pull_back()
        gradients.append(torch.cat([p.grad.flatten() for p in model.bank.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_activation_checkpointing_gives_the_same_gradients(model_type, tmp_path):
    write_checkpoint(tmp_path, random_model(model_type), NumberFormat.int4)
    ids, lengths, mask = make_batch()
    results = []
    for checkpointing in (False, True):
        model = build(tmp_path, spec_for(model_type, "oft"), scale=0.05)
        calls = []
        model.module.model.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            model.enable_checkpointing()
        logprobs, _ = model.logprobs(ids, lengths, mask, temperature=1.0, chunk=64)
        logprobs.sum().backward()
        model.bank.pull_back()
        results.append((logprobs.detach(), model.bank.parameters()[0].grad))
        assert len(calls) == 1 + checkpointing  # recomputed indeed
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["oft", "lora"])
def test_training_moves_the_adapter_and_never_the_base(kind, tmp_path):
    write_checkpoint(tmp_path, random_model("deepseek_v3"), NumberFormat.int4)
    model = build(tmp_path, spec_for("deepseek_v3", kind))
    ids, lengths, mask = make_batch()
    base, first = model.checksum(), model.bank.version(0)
    optimizer = torch.optim.AdamW(model.bank.parameters(), lr=3e-3, weight_decay=0.0)
    scores = []
    for _ in range(8):
        model.bank.zero_grad()
        logprobs, _ = model.logprobs(ids, lengths, mask, temperature=1.0, chunk=64)
        scores.append(float(logprobs.detach().sum() / mask.sum()))
        (-logprobs.sum() / mask.sum()).backward()
        model.bank.pull_back()
        optimizer.step()
        model.bank.materialize()
    assert scores[-1] > scores[0] + 0.5
    assert model.checksum() == base
    assert model.bank.version(1).checksum != first.checksum
    with torch.no_grad(), model.disabled():
        off, _ = model.logprobs(ids, lengths, mask, temperature=1.0, chunk=64)
    fresh = build(tmp_path, spec_for("deepseek_v3", kind))
    with torch.no_grad():
        reference, _ = fresh.logprobs(ids, lengths, mask, temperature=1.0, chunk=64)
    assert torch.equal(off, reference)


def test_masks_that_cannot_be_scored_are_refused(tmp_path):
    write_checkpoint(tmp_path, random_model("llama"))
    model = build(tmp_path, spec_for("llama", "oft"))
    ids, lengths, mask = make_batch()
    first = mask.clone()
    first[0, 0] = True
    with pytest.raises(ValueError, match="nothing before it"):
        model.logprobs(ids, lengths, first, temperature=1.0, chunk=8)
    behind = mask.clone()
    behind[0, -1] = True
    with pytest.raises(ValueError, match="behind the end"):
        model.logprobs(ids, lengths - 1, behind, temperature=1.0, chunk=8)


def test_a_sequence_without_scored_tokens_is_all_zero(tmp_path):
    write_checkpoint(tmp_path, random_model("llama"))
    model = build(tmp_path, spec_for("llama", "oft"), scale=0.05)
    ids, lengths, mask = make_batch()
    reference, _ = model.logprobs(ids, lengths, mask, temperature=1.0, chunk=8)
    mask[2] = False
    found, _ = model.logprobs(ids, lengths, mask, temperature=1.0, chunk=8)
    assert not found[2].any()
    assert torch.allclose(found[[0, 1, 3, 4, 5]], reference[[0, 1, 3, 4, 5]], atol=1e-5)
    nothing, _ = model.logprobs(ids, lengths, torch.zeros_like(mask), temperature=1.0, chunk=8)
    assert not nothing.any()


def test_load_dense_reaches_every_expert():
    """The reference of these tests is only as good as this."""
    model = random_model("qwen3_moe")
    weight = torch.full((32, 64), 3.0)
    load_dense(model, {"model.layers.1.mlp.experts.4.up_proj.weight": weight})
    assert (model.model.layers[1].mlp.experts.gate_up_proj[4, 32:] == 3).all()
    assert (model.model.layers[1].mlp.experts.gate_up_proj == 3).sum() == weight.numel()
