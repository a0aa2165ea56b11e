"""Token ids to logits: embed, blocks, read out.

    x_BTM      = embed[ids_BT]  (+ place[positions], types, norm, lift: as the settings say)
    x_BTM      = block(x_BTM)                      layers times
    logits_BTV = norm(x_BTM) read_VM^T             read is embed itself when tied

Row t of a decoder's logits is about token t + 1, since row t has read tokens 0 to t; row t of an
encoder's is about token t. With an encoder beside the decoder, ``encode`` reads the source once and
``forward`` takes what it gave.

B sequences, T positions, S positions with those read before, M width of the stream, E width of the
embedding, V vocabulary. Fresh parameters: fenchel/model/initialisation.py.

A model laid out without numbers, for weights that will be read.

On the meta device tensors have shapes and no numbers. A model's layers ask for random numbers there
all the same, and torch answers by loading its compiler, which takes over a second; so nothing is
drawn.

A model as it reads, for a while: without dropout, and afterwards as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.functional import dropout, linear
from torch.overrides import TorchFunctionMode

from fenchel.attention import Angles
from fenchel.model.attention import Question
from fenchel.model.block import (
    Block,
    Encoder,
    distance_prior,
    distinct,
    relative_table,
    through,
)
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import Cache, ForwardContext, Observer
from fenchel.model.initialisation import initialise
from fenchel.model.mlp import ACTIVATIONS, Mixture
from fenchel.model.norm import norm
from fenchel.model.rotary_table import RotaryTable, sinusoids


class Transformer(nn.Module):
    """A decoder, an encoder or both, whose parts are chosen by settings."""

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        M, V, E = config.width, config.vocabulary, config.embedding_width or config.width
        self.embed = nn.Embedding(V, E)
        self.place = nn.Embedding(config.context, E) if config.positions == "learned" else None
        self.types = nn.Embedding(config.token_types, E) if config.token_types else None
        self.embed_norm = norm(config, E) if config.embedding_norm else None
        self.lift = None if config.embedding_width is None else nn.Linear(E, M)
        self.relative = relative_table(config)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(distinct(config)))
        self.norm = norm(config) if config.final_norm else None
        self.encoder = Encoder(config) if config.kind == "encoder-decoder" else None
        self.read_map = nn.Linear(M, E) if config.read_transform else None
        self.read_norm = norm(config, E) if config.read_transform else None
        width = E if config.read_transform else M
        self.read = None if config.tied else nn.Linear(width, V, bias=False)
        self.read_bias = nn.Parameter(torch.zeros(V)) if config.read_bias else None
        self.pool = nn.Linear(M, M) if config.pooler else None
        self._turning = RotaryTable(config), RotaryTable(config, local=True)
        self.initialise(generator)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cache: Cache | None = None,
        present_BS: Tensor | None = None,
        types_BT: Tensor | None = None,
        memory_BSM: Tensor | None = None,
        memory_present_BS: Tensor | None = None,
        observe: Observer | None = None,
        last: bool = False,
        read: bool = True,
    ) -> Tensor:
        """(B, T) -> (B, T, V), or (B, 1, V) when only the ``last`` position is asked for.

        ``present_BS`` says which slots hold a token, those of the ``cache`` and then the new ones;
        positions count tokens, and nobody looks at an empty slot. ``memory_BSM`` is what ``encode``
        gave, with its own mask. Without ``read`` the stream is given as it would be read out,
        (B, T, M): what a loss needs that reads it in parts, with ``read_weight``.
        """
        if cache is not None and self.config.kind == "encoder":
            raise ValueError("an encoder reads a sequence at once; call it without a cache.")
        T, start = ids_BT.shape[-1], 0 if cache is None else cache.length
        self._require_fit(ids_BT, start + T, present_BS, memory_BSM)
        positions_BT = None if present_BS is None else places(present_BS)[:, start:]
        x_BTM = self._embed(ids_BT, start, positions_BT, types_BT)
        sight = ForwardContext(
            turns=self._turns(start, start + T, positions_BT, x_BTM),
            present=present_BS,
            bias=distance_prior(self.config, self.relative, T, start + T),
            cache=cache,
            observe=observe,
            memory=memory_BSM,
            memory_present=memory_present_BS,
        )
        x_BTM = through(self.blocks, self.config, x_BTM, sight)
        if cache is not None:
            cache.advance(T)
        x_BTM = self.prepared(x_BTM[:, -1:] if last else x_BTM)
        return self.logits(x_BTM) if read else x_BTM

    def encode(
        self, ids_BS: Tensor, *, present_BS: Tensor | None = None, observe: Observer | None = None
    ) -> Tensor:
        """The source as a decoder will look at it: (B, S) -> (B, S, M)."""
        if self.encoder is None:
            raise ValueError(
                f"a model of kind={self.config.kind!r} has no encoder beside it; call it as it is."
            )
        S = ids_BS.shape[-1]
        self._require_ids(ids_BS, S, present_BS)
        positions_BS = None if present_BS is None else places(present_BS)
        x_BSM = self._embed(ids_BS, 0, positions_BS, None)
        sight = ForwardContext(
            turns=self._turns(0, S, positions_BS, x_BSM),
            present=present_BS,
            bias=distance_prior(self.encoder.config, self.encoder.relative, S, S),
            observe=observe,
        )
        memory_BSM: Tensor = self.encoder(x_BSM, sight)
        return memory_BSM

    def question(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Question:
        """What ``layer`` asks of ``attend`` with the q, k, v that an observer saw.

        For sequences without empty slots: attend(**question._asdict(), return_weights=True) gives
        the layer's weights whatever its choice, window, cap, sink or position bias.
        """
        block = self.blocks[layer * len(self.blocks) // self.config.layers]
        assert isinstance(block, Block)
        bias = distance_prior(self.config, self.relative, q.shape[2], k.shape[2])
        return block.attention.question(q, k, v, ForwardContext(bias=bias))

    def pooled(self, stream_BTM: Tensor) -> Tensor:
        """A vector for a whole sequence, from the stream at its first position: -> (B, M)."""
        if self.pool is None:
            raise ValueError("this model has no pooler; build it with pooler=True.")
        whole: Tensor = self.pool(stream_BTM[:, 0]).tanh()
        return whole

    def balance(self) -> Tensor | None:
        """How unevenly experts were chosen in the last training pass, mean over layers; 1 is best.

        None where there are no experts. Add a small multiple of it to the loss.
        """
        found = [m.balance for m in self.modules() if isinstance(m, Mixture)]
        known = [balance for balance in found if balance is not None]
        return torch.stack(known).mean() if known else None

    def _require_fit(
        self,
        ids_BT: Tensor,
        slots: int,
        present_BS: Tensor | None,
        memory_BSM: Tensor | None,
    ) -> None:
        self._require_ids(ids_BT, slots, present_BS)
        kind = self.config.kind
        if (memory_BSM is None) == (kind == "encoder-decoder"):
            raise ValueError(
                "this decoder looks at what its encoder read; give memory_BSM=model.encode(ids)."
                if memory_BSM is None
                else f"memory_BSM was given to a model of kind={kind!r}, which has no use for it."
            )

    def _require_ids(self, ids_BT: Tensor, slots: int, present_BS: Tensor | None) -> None:
        if ids_BT.ndim != 2 or ids_BT.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got a tensor of {tuple(ids_BT.shape)}."
            )
        if slots > self.config.context:
            raise ValueError(
                f"{slots} positions were given and the model reads {self.config.context}; "
                "shorten the sequence."
            )
        if present_BS is None:
            return
        wanted = (ids_BT.shape[0], slots)
        if present_BS.dtype != torch.bool or tuple(present_BS.shape) != wanted:
            raise ValueError(
                f"present should be bool of shape {wanted}, a slot for each token read so far, "
                f"got {present_BS.dtype} of {tuple(present_BS.shape)}."
            )

    def _embed(
        self, ids_BT: Tensor, start: int, positions_BT: Tensor | None, types_BT: Tensor | None
    ) -> Tensor:
        """x_BTM before the first block; ``start`` positions were read before."""
        x: Tensor = _looked_up(self.embed, ids_BT)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        end = start + ids_BT.shape[1]
        if self.place is not None:
            table = self.place.weight
            x = x + (table[start:end] if positions_BT is None else table[positions_BT])
        elif self.config.positions == "sinusoidal":
            at = torch.arange(start, end, device=x.device) if positions_BT is None else positions_BT
            x = x + sinusoids(at, x.shape[-1]).to(x.dtype)
        if self.types is not None:
            x = x + (
                self.types.weight[0]
                if types_BT is None
                else _looked_up(self.types, types_BT, "types")
            )
        elif types_BT is not None:
            raise ValueError("types were given to a model without any; build it with token_types.")
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = x if self.lift is None else self.lift(x)
        p = self.config.dropout
        return dropout(x, p, self.training) if p else x

    def _turns(
        self, start: int, end: int, positions_BT: Tensor | None, like: Tensor
    ) -> tuple[Angles | None, Angles | None]:
        """How far queries and keys are turned, in layers without a window and in those with one."""
        if self.config.positions != "rotary":
            return None, None

        def angles(turning: RotaryTable) -> Angles:
            if positions_BT is None:
                return turning.between(start, end, like)
            return turning.at(positions_BT, end, like)

        everywhere, local = self._turning
        turn = angles(everywhere)
        return turn, turn if self.config.rotary_local_base is None else angles(local)

    def prepared(self, x_BTM: Tensor) -> Tensor:
        """The stream as the read-out takes it, (B, T, M) or (B, T, E)."""
        if self.norm is not None:
            x_BTM = self.norm(x_BTM)
        if self.read_map is not None and self.read_norm is not None:
            x_BTM = self.read_norm(ACTIVATIONS[self.config.mlp](self.read_map(x_BTM)))
        elif self.lift is not None and self.read is None:
            x_BTM = x_BTM @ self.lift.weight  # down the way it came up
        scale = self.config.logit_scale
        return x_BTM if scale == 1.0 else x_BTM * scale

    def logits(self, x_BTM: Tensor) -> Tensor:
        """What a pass without ``read`` gave, read out: (B, T, M) -> (B, T, V)."""
        logits_BTV = linear(x_BTM, self.read_weight, self.read_bias)
        c = self.config.logit_softcap
        return logits_BTV if c is None else c * torch.tanh(logits_BTV / c)

    @property
    def read_weight(self) -> Tensor:
        """The table that turns the stream into logits, (V, M)."""
        return self.embed.weight if self.read is None else self.read.weight

    @property
    def reads_by_table_alone(self) -> bool:
        """Whether the logits are the stream times ``read_weight`` and nothing more."""
        return self.read_bias is None and self.config.logit_softcap is None

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw every parameter anew, as the settings say."""
        initialise(self, self.config, generator)
        with torch.no_grad():
            if self.read is not None and self.config.initial == "zero":
                self.read.weight.zero_()
            if self.read_bias is not None:
                self.read_bias.zero_()


def places(present_BS: Tensor) -> Tensor:
    """The position of every slot: how many tokens stand before it."""
    return (present_BS.cumsum(-1) - 1).clamp(min=0)


def _looked_up(table: nn.Embedding, ids: Tensor, what: str = "ids") -> Tensor:
    try:
        rows: Tensor = table(ids)
    except IndexError:
        raise ValueError(
            f"{what} run from {int(ids.min())} to {int(ids.max())} and the model knows "
            f"0 to {table.num_embeddings - 1}; use the tokenizer it was trained with."
        ) from None
    return rows


_DRAWS = (
    *(Tensor.normal_, Tensor.uniform_),
    *(init.normal_, init.uniform_, init.kaiming_uniform_),
)


def meta_model(config: ModelConfig) -> Transformer:
    """A model on the meta device."""
    with _Undrawn(), torch.device("meta"):
        return Transformer(config)


class _Undrawn(TorchFunctionMode):
    """Inside, nothing is drawn on the meta device; everywhere else as ever."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DRAWS:
            into = args[0] if args else (kwargs or {})["tensor"]
            if into.is_meta:
                return into
        return func(*args, **kwargs or {})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` evaluates; an error inside changes nothing about what comes after."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
