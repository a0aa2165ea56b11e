"""ScoreTrust around AdamW: training at a learning rate at which AdamW alone blows up its scores.

    python examples/score_trust_around_adamw.py

The wrapper resizes the query and key steps of each head so that no step moves the scores of a
sample by more than ``lr``. Nothing else in the loop changes.
"""

import torch
from torch.nn import functional as F

from fenchel import ModelConfig, ScoreTrust, Transformer, attention_pairs
from fenchel.evaluate.attention import attention_calls


def train(*, trust: bool, rate: float = 0.1, steps: int = 60) -> tuple[float, float]:
    """The last loss, and the largest score on the last batch."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocabulary=64, context=32, width=32, layers=2, heads=2))
    optimiser: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if trust:
        optimiser = ScoreTrust(optimiser, attention_pairs(model), lr=0.2, radius=6.0)
    for _ in range(steps):
        ids = (torch.arange(33) * torch.randint(1, 9, (16, 1))) % 64  # every row counts by its step
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item(), largest_score(model, ids[:, :-1])


def largest_score(model: Transformer, ids: torch.Tensor) -> float:
    """The largest |q k| / sqrt(D) over layers, heads and pairs of tokens."""
    with torch.no_grad():
        calls = attention_calls(model, ids)
        scores = [call.q @ call.k.mT / call.q.shape[-1] ** 0.5 for call in calls]  # before the mask
    return max(one.abs().max().item() for one in scores)


def main() -> dict[str, tuple[float, float]]:
    """Both optimisers, one after the other."""
    results = {"AdamW": train(trust=False), "ScoreTrust(AdamW)": train(trust=True)}
    for name, (loss, score) in results.items():
        print(f"{name:18} loss {loss:6.3f}   largest score {score:7.1f}")
    return results


if __name__ == "__main__":
    main()
