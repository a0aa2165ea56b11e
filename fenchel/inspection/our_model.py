"""A Transformer of fenchel.model for inspection: a run, or a checkpoint of a known family.

Every layer passes its call of ``attend`` (queries, keys, values, choice, prior, scale and soft cap)
to the ``attention_override`` of the forward pass, where it is recorded. A recorded block is called
again with another override in its forward context: none, or the linearised attention of
fenchel/inspection/linearisation.py. A layer of gated DeltaNet makes no such call; it is a block
without attention.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall
from fenchel.checkpoints import load
from fenchel.checkpoints.directory import CheckpointDirectory
from fenchel.checkpoints.load import build
from fenchel.checkpoints.weights import read_weights
from fenchel.choice.base import require_simplex
from fenchel.data import TextTokenizer
from fenchel.files import Damaged
from fenchel.hub_cache import model_name
from fenchel.inspection.recorder import BlockRecord, BlockRecorder, CallArguments, Override
from fenchel.inspection.trace import ForwardTrace, InspectedModel
from fenchel.model import ModelConfig, Transformer, evaluating
from fenchel.model.attention import Attention, layer_choice
from fenchel.model.families import Family, family_of
from fenchel.model.forward_context import ForwardContext


class Unsupported(ValueError):
    """A checkpoint of a known family with a setting or tensor that fenchel.model lacks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OurModel(InspectedModel):
    """A Transformer of fenchel.model."""

    model: Transformer
    reads_out: bool
    """Whether its logits mean anything: an encoder may come without its head."""

    def trace(self, ids: Tensor) -> ForwardTrace:
        """Run the model once and record every block."""
        self.require_known(ids, self.model.config.vocabulary)
        recorder = record_pass(self.model, ids)
        blocks = tuple(
            block._replace(gate=_mean_gate(record))
            for block, record in zip(recorder.block_traces(), recorder.records, strict=True)
        )
        return ForwardTrace(blocks, self._lm_head if self.reads_out else None)

    def _lm_head(self, x: Tensor) -> Tensor:
        return self.model.logits(self.model.lm_head_input(x[:, -1:]))[0, 0]


def record_pass(model: Transformer, ids: Tensor) -> BlockRecorder:
    """Run ``model`` on ids (1, T); its attention calls arrive through ``attention_override``."""
    require_weights(model.config)
    recorder = BlockRecorder(model, run_module)

    def record(_layer: int, call: AttentionCall) -> None:
        recorder.record_attention(call)

    with torch.no_grad(), evaluating(model), recorder:
        model(ids, attention_override=record, last=True, return_hidden=True)
    return recorder


@torch.no_grad()
def _mean_gate(record: BlockRecord) -> Tensor | None:
    """The mean factor of the output gate on every head and query: (H, T), where there is one."""
    if record.attention is None or not isinstance(record.attention.module, Attention):
        return None
    gate = record.attention.module.gate_values(record.attention.x)
    return None if gate is None else gate[0].mean(-1).T


def run_module(
    module: nn.Module, arguments: CallArguments, x: Tensor, override: Override | None
) -> Tensor:
    """A module of a Transformer on the stream x, with ``override`` in its forward context."""

    def replaced(_layer: int, call: AttentionCall) -> Tensor | None:
        return None if override is None else override(call.q, call.k, call.v)

    args = (
        # Its own table of lent keys: those of the recorded pass stay as they are.
        replace(arg, attention_override=replaced, lent_kv=dict(arg.lent_kv))
        if isinstance(arg, ForwardContext)
        else arg
        for arg in arguments.args
    )
    return CallArguments(tuple(args), arguments.kwargs).call(module, x)


def open_run(path: Path) -> OurModel:
    """The best checkpoint of a run directory."""
    model, tokenizer, config = load(path)
    require_choice(config, str(path))
    name, stored = model_name(path), model.lm_head_weight.dtype
    return _opened(model, tokenizer, name, f"fenchel, {config.choice}", stored, path)


def open_known(directory: CheckpointDirectory, tokenizer: TextTokenizer) -> OurModel:
    """A Hugging Face directory by our own loader, in float32; Unsupported says why it cannot be."""
    family, config = _family_and_config(directory)
    require_choice(config, str(directory.path))
    model = build(config, _weights(directory, family, config))
    kind = directory.model_type + ("" if config.choice == "softmax" else f", {config.choice}")
    return _opened(model, tokenizer, directory.name, kind, directory.dtype, directory.path)


def _opened(
    model: Transformer,
    tokenizer: TextTokenizer,
    name: str,
    family: str,
    stored: torch.dtype,
    folder: Path,
) -> OurModel:
    return OurModel(
        name=name,
        family=family,
        model=model.float().eval().requires_grad_(False),
        tokenizer=tokenizer,
        context=model.config.context,
        stored=str(stored).removeprefix("torch."),
        folder=folder,
        reads_out=model.config.lm_head,
    )


def _family_and_config(directory: CheckpointDirectory) -> tuple[Family, ModelConfig]:
    """The family and its settings, if ours has all that they ask for."""
    where, tensors = directory.config_path, directory.tensors
    try:
        family = family_of(directory.model_type, tensors, where, directory.config)
        return family, family.read(directory.config, tensors, where)
    except ValueError as error:
        raise Unsupported(str(error)) from None


def _weights(
    directory: CheckpointDirectory, family: Family, config: ModelConfig
) -> dict[str, Tensor]:
    """Our weights, if the files hold what the settings ask for and nothing more."""
    try:
        return read_weights(directory, family, config, torch.float32)
    except Damaged:
        raise
    except ValueError as error:
        if directory.architecture in (None, family.architecture):
            raise  # it is of this family, and wrong; another head would be another matter
        raise Unsupported(str(error)) from None


def require_choice(config: ModelConfig, name: str) -> None:
    """Refuse a model whose blocks attend twice."""
    if config.kind == "encoder-decoder":
        raise ValueError(
            f"{name} is an encoder and a decoder; only one or the other can be inspected."
        )


def require_weights(config: ModelConfig) -> None:
    """Refuse a model in which no layer gives weights to keys, or one gives none that sum to 1."""
    attending = [layer for layer in range(config.layers) if not config.is_delta(layer)]
    if not attending:
        raise ValueError(
            "every layer of this model is a gated DeltaNet, which gives no weights to keys; an "
            "inspection needs attention in one layer at least."
        )
    for layer in attending:
        require_simplex(layer_choice(config, layer), "an inspection")
