"""One block: look at other positions, then think at each one.

    pre        x = x + a f(norm(x))                for f = attention, then (cross), then mlp
    post       x = norm(x + a f(x))
    both       x = x + a post_norm(f(norm(x)))
    parallel   x = x + a attention(norm(x)) + a mlp(norm'(x))

a is the scale of the residual, 1 unless set. Under "zero" initialisation every f starts at zero
(its last map is), so a fresh pre-norm block is the identity and a deep stack of them trains from
the first step. B sequences, T positions, M width of the stream.
"""

from torch import Tensor, nn
from torch.nn.functional import dropout

from fenchel.model.attention import Attention, Cross
from fenchel.model.config import ModelConfig
from fenchel.model.mixture import Mixture
from fenchel.model.mlp import Mlp
from fenchel.model.norm import norm
from fenchel.model.sight import Cache, Memory, Observer, Sight

__all__ = ["Attention", "Block", "Cache", "Cross", "Memory", "Mixture", "Mlp", "Observer", "Sight"]

ALONE = Sight()


class Block(nn.Module):
    """Attention, then the MLP, each with its norms, added back to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        both = config.norm_place == "both"
        self.attention_norm = norm(config)
        self.attention = Attention(config, layer)
        self.attention_post_norm = norm(config) if both else None
        if config.kind == "encoder-decoder":
            self.cross_norm: nn.Module | None = norm(config)
            self.cross: Cross | None = Cross(config, layer)
            self.cross_post_norm = norm(config) if both else None
        else:
            self.cross_norm = self.cross = self.cross_post_norm = None
        self.mlp_norm = norm(config)
        self.mlp = Mixture(config) if config.experts else Mlp(config)
        self.mlp_post_norm = norm(config) if both else None
        self.post, self.parallel = config.norm_place == "post", config.parallel
        self.scale, self.dropout = config.branch_scale, config.dropout

    def forward(self, x_BTM: Tensor, sight: Sight = ALONE, layer: int | None = None) -> Tensor:
        """(B, T, M) -> (B, T, M); ``layer`` where it is not the one this was built for."""
        if self.post:
            return self._with_norms_after(x_BTM, sight, layer)
        seen = self.attention(self.attention_norm(x_BTM), sight, layer)
        if self.parallel:
            thought = self.mlp(self.mlp_norm(x_BTM))
            x_BTM = self._add(x_BTM, seen, self.attention_post_norm)
            return self._add(x_BTM, thought, self.mlp_post_norm)
        x_BTM = self._add(x_BTM, seen, self.attention_post_norm)
        if self.cross is not None and self.cross_norm is not None:
            recalled = self.cross(self.cross_norm(x_BTM), sight, layer)
            x_BTM = self._add(x_BTM, recalled, self.cross_post_norm)
        return self._add(x_BTM, self.mlp(self.mlp_norm(x_BTM)), self.mlp_post_norm)

    def _with_norms_after(self, x_BTM: Tensor, sight: Sight, layer: int | None) -> Tensor:
        x_BTM = self.attention_norm(self._add(x_BTM, self.attention(x_BTM, sight, layer)))
        if self.cross is not None and self.cross_norm is not None:
            x_BTM = self.cross_norm(self._add(x_BTM, self.cross(x_BTM, sight, layer)))
        thought: Tensor = self.mlp_norm(self._add(x_BTM, self.mlp(x_BTM)))
        return thought

    def _add(self, x_BTM: Tensor, branch: Tensor, after: nn.Module | None = None) -> Tensor:
        """The stream with what a branch gave."""
        if after is not None:
            branch = after(branch)
        branch = self._drop(branch)
        return x_BTM + branch if self.scale == 1.0 else x_BTM + self.scale * branch

    def _drop(self, branch: Tensor) -> Tensor:
        return dropout(branch, self.dropout, self.training) if self.dropout else branch
