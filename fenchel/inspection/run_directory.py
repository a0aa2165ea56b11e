"""One of our own runs as a subject."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from fenchel.attention import Causal
from fenchel.choice import named
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
        model, config = self.model, self.model.config
        choice, scale = named(config.choice, alpha=config.alpha), config.head_width**-0.5
        recorder = Recorder(model)
        listening = True

        def observe(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            if listening:  # blocks keep their arguments, this one too, and are called again
                recorder.attended(Attention(q, k, v, choice, Causal(), scale))

        with torch.no_grad(), evaluating(model), recorder:
            model(ids, observe=observe, last=True)
        listening = False
        passages = tuple(recorder.passages)

        def logits(x: Tensor) -> Tensor:
            for passage in passages:
                x = passage.block(x)
            return linear(model.norm(x[0, -1]), model.read_weight)

        return Reading(passages, logits, logits)

    def encode(self, text: str, *, first: bool) -> list[int]:
        """A document begins after an end, as in training."""
        ids = encode(self.tokenizer, text)
        return [end_id(self.tokenizer), *ids] if first else ids


def open_run(path: Path) -> Run | None:
    """The best checkpoint of a run directory; None where there is no run."""
    if not (path / "checkpoints").is_dir():
        return None
    model, tokenizer, config = load(path)
    weights = model.read_weight.dtype
    return Run(
        name=path.resolve().name,
        family=f"fenchel, {config.choice}",
        model=model.float().eval().requires_grad_(False),
        tokenizer=tokenizer,
        context=config.context,
        stored=str(weights).removeprefix("torch."),
    )
