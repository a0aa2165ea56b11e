"""One block: look at other positions, then think at each one.

    pre        x = x + a f(norm(x))                for f = attention, then (cross), then mlp
    post       x = norm(x + a f(x))
    both       x = x + a post_norm(f(norm(x)))
    parallel   x = x + a attention(norm(x)) + a mlp(norm'(x))

a is the scale of the residual, 1 unless set. Under "zero" initialisation every f starts at zero
(its last map is), so a fresh pre-norm block is the identity and a deep stack of them trains from
the first step. B sequences, T positions, M width of the stream.

An encoder beside a decoder: blocks that look both ways, read once for many steps.

    memory_BSM = norm(block(... block(x_BSM)))

It shares the embedding of the Transformer it belongs to, and has blocks, a norm and a table of
relative positions of its own.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn.functional import dropout

from fenchel.attention import ALiBi, Dense, Prior, RelativeBias
from fenchel.model.attention import Attention, CrossAttention
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import ForwardContext
from fenchel.model.mlp import Mixture, Mlp
from fenchel.model.norm import norm

ALONE = ForwardContext()


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
            self.cross: CrossAttention | None = CrossAttention(config, layer)
            self.cross_post_norm = norm(config) if both else None
        else:
            self.cross_norm = self.cross = self.cross_post_norm = None
        self.mlp_norm = norm(config)
        self.mlp = Mixture(config) if config.experts else Mlp(config)
        self.mlp_post_norm = norm(config) if both else None
        self.post, self.parallel = config.norm_place == "post", config.parallel
        self.scale, self.dropout = config.branch_scale, config.dropout

    def forward(
        self, x_BTM: Tensor, sight: ForwardContext = ALONE, layer: int | None = None
    ) -> Tensor:
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

    def _with_norms_after(self, x_BTM: Tensor, sight: ForwardContext, layer: int | None) -> Tensor:
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


class Encoder(nn.Module):
    """The stream of a source to what a decoder looks at."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers = config.encoder_layers or config.layers
        config = replace(config, kind="encoder", layers=layers, encoder_layers=None)
        self.config = config
        self.relative = relative_table(config)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(distinct(config)))
        self.norm = norm(config) if config.final_norm else None

    def forward(self, x_BSM: Tensor, sight: ForwardContext) -> Tensor:
        """(B, S, M) -> (B, S, M)."""
        x_BSM = through(self.blocks, self.config, x_BSM, sight)
        return x_BSM if self.norm is None else self.norm(x_BSM)


def through(
    blocks: nn.ModuleList, config: ModelConfig, x_BTM: Tensor, sight: ForwardContext
) -> Tensor:
    """Layer after layer; a block may serve several in a row."""
    each = config.layers // len(blocks)
    for layer in range(config.layers):
        x_BTM = blocks[layer // each](x_BTM, sight, layer)
    return x_BTM


def distinct(config: ModelConfig) -> int:
    """How many blocks there are."""
    return config.layers if config.distinct_layers is None else config.distinct_layers


def relative_table(config: ModelConfig) -> nn.Embedding | None:
    """The learned numbers of T5's relative positions, (buckets, H), shared by all layers."""
    return nn.Embedding(config.buckets, config.heads) if config.positions == "buckets" else None


def distance_prior(
    config: ModelConfig, relative: nn.Embedding | None, T: int, S: int
) -> Prior | None:
    """What distances add to the scores of T queries on S keys in every layer."""
    if relative is None:
        return ALiBi(config.heads) if config.positions == "alibi" else None
    table = relative.weight
    bias = RelativeBias(table, config.kind == "encoder", config.bucket_distance)
    if any(config.windows):  # a layer may keep fewer keys than others
        return bias
    return Dense(bias.log(T, S, H=config.heads, device=table.device, dtype=table.dtype))
