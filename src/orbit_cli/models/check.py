"""Is a checkpoint folder the model that its config.json describes? Answered from config and headers, before anything
is loaded, converted or started: every tensor has a place and its shape, and every place has a tensor.

Left out: what the numbers are (quantization's readers check scales when a tensor is read).
"""

from __future__ import annotations

from orbit_cli.errors import CheckpointError
from orbit_cli.models.empty import EmptyModel, empty_model
from orbit_cli.models.families import EXPERT, FAMILIES
from orbit_cli.quantization.checkpoint import CheckpointReader

_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def check_checkpoint(reader: CheckpointReader) -> None:
    """Raises CheckpointError, naming the field, tensor or part that does not fit, or a family that is not ours."""
    check_tensors(empty_model(reader), reader)


def check_known(reader: CheckpointReader) -> None:
    """As `check_checkpoint`, but a family that is not ours passes: it can be converted, if not trained."""
    if reader.config.get("model_type") in FAMILIES:
        check_checkpoint(reader)


def check_tensors(model: EmptyModel, reader: CheckpointReader) -> None:
    """Compare every tensor's header with the empty model. Raises CheckpointError."""
    family, layers = model.family, model.config.num_hidden_layers
    wanted = _wanted(model)
    missing = dict.fromkeys(wanted)
    for stored in reader.names():
        if family.skips(stored, layers):
            continue
        path, _, leaf = stored.rpartition(".")
        quantized = leaf != "bias" and reader.is_quantized(path)
        name = f"{path}.weight" if quantized else stored
        if name == f"{family.prefix}lm_head.weight" and model.config.tie_word_embeddings:
            continue  # a stored copy of the embeddings
        if name not in wanted or (quantized and not _may_be_quantized(model, path)):
            raise CheckpointError(
                f"{reader.path} has a tensor {stored} that {model.config.model_type} has no place for; "
                "use a checkpoint of this architecture with at most its decoder's linears quantised"
            )
        if name not in missing:
            continue  # another part of a quantised linear
        found = reader.linear_shape(path) if quantized else reader.shape(stored)
        if found != wanted[name]:
            raise CheckpointError(
                f"{name.removesuffix('.weight')} has shape {list(found)} in {reader.path}, but config.json makes it "
                f"{list(wanted[name])}; use config.json and weights of one model"
            )
        del missing[name]
    if missing:
        raise CheckpointError(
            f"{reader.path} lacks {next(iter(missing))} (and {len(missing) - 1} more); "
            "the checkpoint is incomplete, copy or convert it again"
        )


def _may_be_quantized(model: EmptyModel, stored: str) -> bool:
    path = stored.removeprefix(model.family.prefix)
    return path in model.linears or EXPERT.match(path) is not None


def _wanted(model: EmptyModel) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint must have, by its published name, as if nothing were quantised."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, linear in model.linears.items():
        shapes[f"{path}.weight"] = (linear.out_features, linear.in_features)
        if linear.has_bias:
            shapes[f"{path}.bias"] = (linear.out_features,)
    for path, experts in model.experts.items():
        up = (experts.intermediate, experts.hidden)
        for number in range(experts.experts):
            for part in _EXPERT_PARTS:
                shapes[f"{path}.{number}.{part}.weight"] = up[::-1] if part == "down_proj" else up
    tied = model.config.tie_word_embeddings
    for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
        # Rotary tables are computed, and a tied lm_head is the embeddings: neither is in a checkpoint.
        if "rotary_emb" not in name and not (tied and name == "lm_head.weight"):
            shapes[name] = tuple(tensor.shape)
    return {model.family.prefix + name: shape for name, shape in shapes.items()}
