"""Which command serves which family: the table of docs/checkpoints.md, found by trying.

The smallest model of every family (``SMALLEST`` of test_written_settings.py) goes through what each
command does with a model. ``python -m tests.model.families.command_matrix`` writes the table, and
test_command_matrix.py compares it.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fenchel.evaluate.score import require_decoder
from fenchel.generation import generate
from fenchel.generation.plain_decoder import why_not_plain
from fenchel.inspection.certificates import why_no_block, why_not
from fenchel.inspection.our_model import record_pass, require_choice
from fenchel.interpretability import ablate, lens
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families import FAMILIES
from fenchel.pipeline.tuning import tune_settings
from fenchel.server.embeddings import embed
from fenchel.steering import difference_of_means, divergence
from tests.model.families.test_written_settings import SIZES, SMALLEST

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- commands of families -->\n", "<!-- end -->\n"
IDS = torch.arange(2, 8)[None]


def generated(model: Transformer) -> None:
    source = {"source": IDS} if model.config.kind == "encoder-decoder" else {}
    generate(model, IDS, max_new_tokens=1, temperature=0.0, **source)


def embedded(model: Transformer) -> None:
    embed(model, [2, 3])


def tuned(model: Transformer) -> None:
    tune_settings({}, Path("checkpoint"), model.config)
    gradients(model)


def gradients(model: Transformer) -> None:
    """Of the loss, for every weight that learns."""
    logits = model(IDS)
    loss = cross_entropy(logits[0, :-1], IDS[0, 1:])
    learning = [p for p in model.parameters() if p.requires_grad]
    if not all(bool(g.isfinite().all()) for g in torch.autograd.grad(loss, learning)):
        raise ValueError("a gradient is not finite.")


def inspected(model: Transformer) -> None:
    require_choice(model.config, "model")
    record_pass(model, IDS).block_traces()


def certified(model: Transformer, why: Callable[..., str | None] = why_not) -> None:
    """Whether a layer is, of those that attend."""
    inspected(model)
    reasons = [why(record) for record in record_pass(model, IDS).records if record.call]
    if all(reasons):
        raise ValueError(reasons[0])


def certified_blocks(model: Transformer) -> None:
    certified(model, why_no_block)


def steered(model: Transformer) -> None:
    require_decoder(model)
    direction = difference_of_means(model, [IDS[0].tolist()], [[1, 2]], layer=1)
    divergence(model, direction, IDS[0].tolist())


def fast(model: Transformer) -> None:
    if reason := why_not_plain(model):
        raise ValueError(reason)


def looked_into(model: Transformer) -> None:
    require_decoder(model)
    lens(model, IDS[0].tolist(), kind="logit")
    ablate(model, IDS[0].tolist(), to="zero")


COLUMNS: dict[str, Callable[[Transformer], None]] = {
    "`generate`, `chat`, `serve`": generated,
    "`/v1/embeddings` of `serve`": embedded,
    "`eval`": require_decoder,
    "`tune`": tuned,
    "`inspect`": inspected,
    "`certify`": certified,
    "`certify --blocks`": certified_blocks,
    "`lens`, `ablate`, `patch`": looked_into,
    "`steer`": steered,
    "fast steps": fast,
}


def served(model: Transformer, command: Callable[[Transformer], None]) -> bool:
    try:
        command(model)
    except ValueError:
        return False
    return True


def matrix() -> str:
    """The table, with a row per family; a model without its head differs in ``generate`` alone."""
    lines = [
        f"| family | {' | '.join(COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
    ]
    for family in {family.architecture: family for family in FAMILIES}.values():
        config = ModelConfig(**{**SIZES, **SMALLEST[family.architecture]})
        if not config.lm_head:
            continue
        model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
        cells = ("yes" if served(model, command) else "" for command in COLUMNS.values())
        lines.append(f"| `{family.name}` | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{matrix()}\n{END}{rest.partition(END)[2]}")
