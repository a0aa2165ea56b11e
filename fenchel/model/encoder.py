"""An encoder beside a decoder: blocks that look both ways, read once for many steps.

    memory_BSM = norm(block(... block(x_BSM)))

It shares the embedding of the Transformer it belongs to, and has blocks, a norm and a table of
relative positions of its own.
"""

from dataclasses import replace

from torch import Tensor, nn

from fenchel.attention import ALiBi, Dense, Prior, RelativeBias
from fenchel.model.block import Block
from fenchel.model.config import ModelConfig
from fenchel.model.norm import norm
from fenchel.model.sight import Sight


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

    def forward(self, x_BSM: Tensor, sight: Sight) -> Tensor:
        """(B, S, M) -> (B, S, M)."""
        x_BSM = through(self.blocks, self.config, x_BSM, sight)
        return x_BSM if self.norm is None else self.norm(x_BSM)


def through(blocks: nn.ModuleList, config: ModelConfig, x_BTM: Tensor, sight: Sight) -> Tensor:
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
