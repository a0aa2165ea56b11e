"""Token ids to logits: embed, blocks, read out.

    x_BTM      = embed[ids_BT]  (+ place[positions_T])
    x_BTM      = block(x_BTM)                      layers times
    logits_BTV = norm(x_BTM) read_VM^T             read is embed itself when tied

Row t of the logits is about token t + 1, since row t has read tokens 0 to t. B sequences,
T positions, M width of the stream, V vocabulary.

Initialisation: a map of M inputs draws N(0, 1/M); the last map of every branch and an untied
read-out are zero, so the logits start as those of the embedding alone and no depth rule is
needed; the embedding draws N(0, 0.02^2), so that tied logits start near zero.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from fenchel.attention import angles
from fenchel.model.block import Attention, Block, Cache, Mlp, Observer, norm
from fenchel.model.config import ModelConfig


class Transformer(nn.Module):
    """A decoder whose every attention layer makes the same kind of choice."""

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.place = (
            nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = norm(config)
        self.read = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialise(generator)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cache: Cache | None = None,
        observe: Observer | None = None,
        last: bool = False,
    ) -> Tensor:
        """(B, T) -> (B, T, V), or (B, 1, V) when only the ``last`` position is asked for."""
        T, start = ids_BT.shape[1], 0 if cache is None else cache.length
        if start + T > self.config.context:
            raise ValueError(
                f"{start + T} positions were given and the model reads {self.config.context}; "
                "shorten the sequence."
            )
        positions_T = torch.arange(start, start + T, device=ids_BT.device)
        x_BTM = self.embed(ids_BT)
        if self.place is not None:
            x_BTM = x_BTM + self.place(positions_T)
        if self.training and self.config.dropout:
            x_BTM = dropout(x_BTM, self.config.dropout)
        turn = None
        if self.config.positions == "rotary":
            turn = angles(positions_T, self.config.head_width, base=self.config.rotary_base)
        for block in self.blocks:
            x_BTM = block(x_BTM, turn, cache, observe)
        if cache is not None:
            cache.advance(T)
        if last:
            x_BTM = x_BTM[:, -1:]
        return linear(self.norm(x_BTM), self.read_weight)

    @property
    def read_weight(self) -> Tensor:
        """The table that turns the stream into logits, (V, M)."""
        return self.embed.weight if self.read is None else self.read.weight

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw every parameter anew, as the module docstring says."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 0.02, generator=generator)
        for module in self.modules():
            if isinstance(module, Attention):
                module.out.weight.zero_()
            elif isinstance(module, Mlp):
                module.down.weight.zero_()
        if self.read is not None:
            self.read.weight.zero_()
