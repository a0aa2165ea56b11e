"""Another attention map in a plain GPT: one line of its attention changes.

    python examples/attend_in_a_gpt.py

A plain GPT calls ``scaled_dot_product_attention(q, k, v, is_causal=True)``. Here it calls
``fenchel.attend`` with entmax, which gives most keys a weight of exactly 0, and learns to copy: the
second half of every sequence repeats the first.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel import Causal, Entmax, attend

VOCABULARY, CONTEXT, WIDTH, HEADS = 16, 16, 32, 2


class Block(nn.Module):
    """Attention and an MLP, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH) to the same."""
        B, T, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(B, T, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = attend(q, k, v, choice=Entmax(1.5), prior=Causal())  # the line that changes
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Two blocks between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, T) to logits (B, T, VOCABULARY)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def main(steps: int = 300) -> float:
    """Train, and return the share of the second half that is copied."""
    torch.manual_seed(0)
    model = GPT()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    half = CONTEXT // 2
    for step in range(steps):
        first = torch.randint(VOCABULARY, (64, half))
        ids = torch.cat((first, first), 1)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits[:, half - 1 :].flatten(0, 1), ids[:, half:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step:4}  loss {loss:.3f}")
    hits = (logits[:, half - 1 :].argmax(-1) == ids[:, half:]).float().mean().item()
    print(f"copied {hits:.0%}")
    return hits


if __name__ == "__main__":
    main()
