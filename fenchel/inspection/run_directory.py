"""One of our own runs as a subject."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fenchel.data import encode, end_id
from fenchel.inspection.recorder import Recorder
from fenchel.inspection.subject import Attention, Reading, Subject
from fenchel.model import Transformer, evaluating, load


@dataclass(frozen=True, kw_only=True, eq=False)
class Run(Subject):
    """A Transformer of fenchel.model."""

    model: Transformer

    def read(self, ids: Tensor) -> Reading:
        """Run it once; its attention reports through ``observe``."""
        model = self.model
        recorder = Recorder(model)
        listening = True

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            if listening:  # blocks keep their arguments, this one too, and are called again
                asked = model.question(layer, q, k, v)
                scale = q.shape[-1] ** -0.5 if asked.scale is None else asked.scale
                recorder.attended(
                    Attention(asked.q, asked.k, asked.v, asked.choice, asked.prior, scale)
                )

        with torch.no_grad(), evaluating(model), recorder:
            model(ids, observe=observe, last=True)
        listening = False

        def read_out(x: Tensor) -> Tensor:
            return model.logits(model.prepared(x[:, -1:]))[0, 0]

        return Reading(tuple(recorder.passages), read_out)

    def encode(self, text: str, *, first: bool) -> list[int]:
        """A document begins after an end, as in training."""
        ids = encode(self.tokenizer, text)
        return [end_id(self.tokenizer), *ids] if first else ids


def open_run(path: Path) -> Run | None:
    """The best checkpoint of a run directory; None where there is no run."""
    if not (path / "checkpoints").is_dir():
        return None
    model, tokenizer, config = load(path)
    for name in ("softcap", "sinks"):
        if getattr(config, name):
            raise ValueError(
                f"{path} is a model with {name}={getattr(config, name)}, whose attention is more "
                "than a choice among keys; it cannot be inspected."
            )
    weights = model.read_weight.dtype
    return Run(
        name=path.resolve().name,
        family=f"fenchel, {config.choice}",
        model=model.float().eval().requires_grad_(False),
        tokenizer=tokenizer,
        context=config.context,
        stored=str(weights).removeprefix("torch."),
    )
