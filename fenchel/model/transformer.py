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

from fenchel.attention import Angles, angles
from fenchel.model.block import Attention, Block, Cache, Mlp, Observer
from fenchel.model.config import ModelConfig
from fenchel.model.norm import norm


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
        self._table = Angles(torch.empty(0), torch.empty(0))
        self.initialise(generator)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cache: Cache | None = None,
        observe: Observer | None = None,
        last: bool = False,
        read: bool = True,
    ) -> Tensor:
        """(B, T) -> (B, T, V), or (B, 1, V) when only the ``last`` position is asked for.

        Without ``read`` the normalised stream is given instead, (B, T, M): what a loss needs
        that reads it out in parts, with ``read_weight``.
        """
        T, start = ids_BT.shape[-1], 0 if cache is None else cache.length
        self._require_fit(ids_BT, start + T)
        x_BTM = self._embed(ids_BT, start)
        turn = None
        if self.config.positions == "rotary":
            turn = self._angles(start, start + T, x_BTM)
        for block in self.blocks:
            x_BTM = block(x_BTM, turn, cache, observe)
        if cache is not None:
            cache.advance(T)
        if last:
            x_BTM = x_BTM[:, -1:]
        x_BTM = self.norm(x_BTM)
        return linear(x_BTM, self.read_weight) if read else x_BTM

    def _require_fit(self, ids_BT: Tensor, positions: int) -> None:
        if ids_BT.ndim != 2 or ids_BT.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got a tensor of {tuple(ids_BT.shape)}."
            )
        if positions > self.config.context:
            raise ValueError(
                f"{positions} positions were given and the model reads {self.config.context}; "
                "shorten the sequence."
            )

    def _embed(self, ids_BT: Tensor, start: int) -> Tensor:
        """x_BTM before the first block; ``start`` positions were read before."""
        try:
            x_BTM: Tensor = self.embed(ids_BT)
        except IndexError:
            raise ValueError(
                f"ids run from {int(ids_BT.min())} to {int(ids_BT.max())} and the model knows "
                f"0 to {self.config.vocabulary - 1}; use the tokenizer it was trained with."
            ) from None
        if self.place is not None:
            x_BTM = x_BTM + self.place.weight[start : start + ids_BT.shape[1]]
        p = self.config.dropout
        return dropout(x_BTM, p, self.training) if p else x_BTM

    def _angles(self, start: int, end: int, like: Tensor) -> Angles:
        """Those of positions ``start`` to ``end``, cut from a table that is kept.

        It is a tenth of the work of decoding one token of a small model, and never changes.
        """
        D, base = self.config.head_width, self.config.rotary_base
        exact = torch.promote_types(like.dtype, torch.float32)
        cos, sin = self._table
        if len(cos) < end or cos.device != like.device or cos.dtype != exact:
            size = min(self.config.context, 2 * end)
            with torch.inference_mode(False):  # a table made while decoding serves training too
                positions = torch.arange(size, device=like.device)
                cos, sin = self._table = angles(positions, D, base=base, dtype=exact)
        return Angles(cos[start:end], sin[start:end])

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
