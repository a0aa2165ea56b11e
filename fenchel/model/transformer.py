"""Token ids to logits: embedding, blocks, LM head.

    x_BTM      = embed[ids_BT]  (+ pos_embed, + type_embed, norm, embed_proj: by the settings)
    x_BTM      = block(x_BTM)                      once per layer
    logits_BTV = norm(x_BTM) lm_head_VM^T          lm_head is embed itself when tied

With ``per_layer_width`` every layer l has a further embedding of the token, which its block reads:

    e_BTLP = (norm(x_BTM W^T M^(-1/2)) + P^(1/2) per_layer_embed[ids_BT]) 2^(-1/2)

Row t of a decoder's logits predicts token t + 1, since row t depends on tokens 0 to t; row t of an
encoder's predicts token t. In an encoder-decoder, ``encode`` runs over the source once
and ``forward`` takes its output.

``meta_model`` builds a model on the meta device, where tensors have shapes and no values, for
weights that are read from a file. Random draws are skipped there: they have no effect on a meta
tensor, and make torch import its compiler, which takes over a second. ``evaluating`` switches
dropout off inside a ``with`` block.

B sequences, T positions, S positions with those in the cache, M width of the stream, E width of the
embedding, L layers, P ``per_layer_width``, V vocabulary.
Fresh parameters: fenchel/model/initialisation.py.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.functional import dropout, linear
from torch.overrides import TorchFunctionMode

from fenchel.attention import Angles
from fenchel.attention.spec import AttentionCall
from fenchel.attention.temperature import log_length, stepped_length
from fenchel.model.attention import Attention
from fenchel.model.block import Block, Encoder, position_bias, relative_bias_table, run_blocks
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import (
    AttentionOverride,
    Cache,
    ForwardContext,
    Observer,
    SequencePart,
    StreamVectors,
)
from fenchel.model.initialisation import initialise, post_norm_trouble
from fenchel.model.mlp import ACTIVATIONS, MixtureOfExperts, Mlp
from fenchel.model.norm import norm
from fenchel.model.rotary_table import RotaryTable, sinusoids

Module = TypeVar("Module", bound=nn.Module)


class Transformer(nn.Module):
    """A decoder, an encoder or both, whose parts are chosen by settings.

    >>> model = Transformer(ModelConfig(vocabulary=256, width=32, layers=2, heads=2))
    >>> model(torch.tensor([[72, 101, 108]])).shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        M, V, E = config.width, config.vocabulary, config.embedding_width or config.width
        self.embed = nn.Embedding(V, E)
        self.pos_embed = nn.Embedding(config.context, E) if config.positions == "learned" else None
        self.type_embed = nn.Embedding(config.token_types, E) if config.token_types else None
        self.embed_norm = norm(config, E) if config.embedding_norm else None
        self.embed_proj = None if config.embedding_width is None else nn.Linear(E, M)
        LP = config.layers * config.per_layer_width
        self.per_layer_embed = nn.Embedding(V, LP) if LP else None
        self.per_layer_proj = nn.Linear(M, LP, bias=False) if LP else None
        self.per_layer_norm = norm(config, config.per_layer_width) if LP else None
        self.relative_bias = relative_bias_table(config)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.block_count))
        self.norm = norm(config) if config.final_norm else None
        self.encoder = Encoder(config) if config.kind == "encoder-decoder" else None
        transform = config.lm_head_transform
        self.lm_head_proj = nn.Linear(M, E, bias=config.bias) if transform else None
        self.lm_head_norm = norm(config, E) if config.lm_head_transform else None
        width = E if config.lm_head_transform else M
        untied = config.lm_head and not config.tied
        self.lm_head = nn.Linear(width, V, bias=False) if untied else None
        self.lm_head_bias = nn.Parameter(torch.zeros(V)) if config.lm_head_bias else None
        self.pooler = nn.Linear(M, M) if config.pooler else None
        self._rotary_tables = RotaryTable(config), RotaryTable(config, local=True)
        self.source_files: Mapping[str, bytes] = {}
        """Files beside the weights of the Hugging Face directory it was loaded from, by name; they
        are written again when it is saved."""
        self.initialise(generator)

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cache: Cache | None = None,
        token_mask_BS: Tensor | None = None,
        segments_BT: Tensor | None = None,
        types_BT: Tensor | None = None,
        memory_BSM: Tensor | None = None,
        memory_mask_BS: Tensor | None = None,
        observe: Observer | None = None,
        attention_override: AttentionOverride | None = None,
        part: SequencePart | None = None,
        steer: StreamVectors | None = None,
        recompute: bool = False,
        last: bool = False,
        return_hidden: bool = False,
        return_stream: bool = False,
    ) -> Tensor:
        """(B, T) -> (B, T, V), or (B, 1, V) with ``last``: the logits of only the last position.

        ``token_mask_BS`` is True at slots that hold a token; positions count tokens, and padding is
        never attended to. The rows of a ``cache`` have no padding. ``segments_BT`` numbers
        the documents of rows that hold several, one after another: each is read as if it stood
        alone. ``part`` selects the positions that are computed and gathers keys and values of the
        rest; the result has only these positions. ``memory_BSM`` is the output of ``encode``, with
        its own mask. ``observe`` receives the queries, keys and values of every layer;
        ``attention_override`` may replace its attention output (fenchel/model/forward_context.py).
        ``steer`` is added to the stream after some layers.
        With ``recompute`` blocks keep only their inputs for the backward pass, which runs them
        again (fenchel/model/block.py). With ``return_hidden`` the input of the LM head is returned
        instead of the logits, (B, T, M), for a loss that computes them in parts; a model without an
        LM head has nothing else to return. ``return_stream`` returns the output of the last block
        after the last norm, (B, T, M), which an LM head with further layers changes again.
        """
        if cache is not None and self.config.kind == "encoder":
            raise ValueError("an encoder reads a sequence at once; call it without a cache.")
        if cache is not None and recompute:
            raise ValueError(
                "recompute runs a block twice, which would append to the cache twice; leave out "
                "one of them."
            )
        if cache is not None and token_mask_BS is not None:
            raise ValueError("the rows of a cache have lengths, and no token mask; leave it out.")
        T, start = ids_BT.shape[-1], 0 if cache is None else cache.length
        self._require_ids(ids_BT, start + T, token_mask_BS)
        kind = self.config.kind
        if (memory_BSM is None) == (kind == "encoder-decoder"):
            raise ValueError(
                "this decoder attends to its encoder's output; give memory_BSM=model.encode(ids)."
                if memory_BSM is None
                else f"memory_BSM was given and kind={kind!r} has no cross-attention; leave it out."
            )
        positions_BT = None if token_mask_BS is None else token_positions(token_mask_BS)
        if cache is not None:
            positions_BT = cache.new_positions(T)
        if segments_BT is not None:
            if cache is not None or token_mask_BS is not None or segments_BT.shape != ids_BT.shape:
                raise ValueError(
                    "segments_BT numbers the documents of whole rows, one number per id: give it "
                    "in the shape of the ids, without a cache and without a token mask."
                )
            positions_BT = segment_positions(segments_BT)
        if part is not None:
            if cache is not None or token_mask_BS is not None or self.config.kind != "decoder":
                raise ValueError(
                    "a part of the positions is computed by a decoder on whole sequences, without "
                    "a cache and without a token mask."
                )
            at = part.positions(T, ids_BT.device)
            if positions_BT is None:
                positions_BT = torch.arange(T, device=ids_BT.device).expand(ids_BT.shape)
            ids_BT, positions_BT = ids_BT[:, at], positions_BT[:, at]
            types_BT = None if types_BT is None else types_BT[:, at]
        x_BTM = self._embed(ids_BT, start, positions_BT, types_BT)
        in_order = cache is None or (T > 1 or positions_BT is None)
        shape = {"one_shape": part is None and in_order}
        context = ForwardContext(
            rotary=self._rotary(start, start + T, positions_BT, x_BTM),
            query_scale=self._query_scale(start, start + T, positions_BT, x_BTM),
            token_mask=token_mask_BS,
            segments=segments_BT,
            position_bias=position_bias(self.config, self.relative_bias, T, start + T, **shape),
            cache=cache,
            part=part,
            observe=observe,
            attention_override=attention_override,
            memory=memory_BSM,
            memory_mask=memory_mask_BS,
            recompute=recompute,
            steer=steer,
            per_layer=self._per_layer(ids_BT, x_BTM),
        )
        x_BTM = run_blocks(self.blocks, self.config, x_BTM, context)
        if cache is not None:
            cache.advance(T)
        x_BTM = x_BTM[:, -1:] if last else x_BTM
        if return_stream:
            return x_BTM if self.norm is None else self.norm(x_BTM)
        x_BTM = self.lm_head_input(x_BTM)
        return x_BTM if return_hidden else self.logits(x_BTM)

    def with_context(self, context: int, *, rotary_scaling: str | None = None) -> "Transformer":
        """A model with these parameters, shared, that reads ``context`` positions.

        Quality beyond the trained context is not guaranteed: it changes little under ALiBi and
        relative biases, rotary positions need ``rotary_scaling`` ("linear", "ntk", "yarn",
        "llama3"), and learned tables have no further rows (docs/maths/model.md).

        >>> model = Transformer(ModelConfig(vocabulary=16, context=4, width=32))
        >>> model.with_context(64)(torch.arange(12)[None]).shape
        torch.Size([1, 12, 16])
        """
        config = self.config.with_context(context, rotary_scaling)
        other = copy(self)  # shares every module and parameter
        other.config = config
        other._rotary_tables = RotaryTable(config), RotaryTable(config, local=True)
        return other

    def require_steerable(self) -> None:
        """Refuse a model to whose stream a block's last bias does not add directly."""
        config = self.config
        reasons = {
            f"norm_place is {config.norm_place!r}": config.norm_place != "pre",
            "its blocks have experts": bool(config.experts),
            "layers share a block": config.block_count < config.layers,
            "a block goes on after its MLP": bool(config.per_layer_width) or config.layer_scale,
            "it reparametrises its matrices": config.sigma_reparam,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"a direction cannot be added after a block: {reason}.")

    def steered(self, vectors: Mapping[int, Tensor]) -> "Transformer":
        """A model with these parameters, shared, that adds vectors (M,) to its stream.

        ``vectors`` are numbered by the layer, from 1, after which they are added at every position:
        as part of the bias of the last matrix of that block. A vector of zeros changes no bit of
        the stream.

        >>> model = Transformer(ModelConfig(vocabulary=16, context=4, width=32))
        >>> other = model.steered({1: torch.ones(32)})
        >>> other.embed is model.embed, other.blocks[0].mlp.up is model.blocks[0].mlp.up
        (True, True)
        """
        self.require_steerable()
        other = _shallow(self)
        other.blocks = _shallow(self.blocks)
        for layer, v_M in vectors.items():
            if not 1 <= layer <= self.config.layers or v_M.shape != (self.config.width,):
                raise ValueError(
                    f"a vector of {tuple(v_M.shape)} after layer {layer} should be of "
                    f"({self.config.width},) after layer 1 to {self.config.layers}."
                )
            block = other.blocks[layer - 1] = _shallow(self.blocks[layer - 1])
            assert isinstance(block, Block)
            block.mlp = mlp = _shallow(block.mlp)
            assert isinstance(mlp, Mlp)
            mlp.down = down = _shallow(mlp.down)
            bias = (v_M / self.config.branch_scale).to(down.weight.device, down.weight.dtype)
            bias = bias if down.bias is None else down.bias.detach() + bias
            down.bias = nn.Parameter(bias, requires_grad=False)
        return other

    def encode(
        self,
        ids_BS: Tensor,
        *,
        token_mask_BS: Tensor | None = None,
        observe: Observer | None = None,
        attention_override: AttentionOverride | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """The encoder's output, to which the decoder attends: (B, S) -> (B, S, M).

        ``recompute`` as in ``forward``.
        """
        if self.encoder is None:
            raise ValueError(
                f"a model of kind={self.config.kind!r} has no separate encoder; call it directly."
            )
        S = ids_BS.shape[-1]
        self._require_ids(ids_BS, S, token_mask_BS)
        positions_BS = None if token_mask_BS is None else token_positions(token_mask_BS)
        x_BSM = self._embed(ids_BS, 0, positions_BS, None)
        context = ForwardContext(
            rotary=self._rotary(0, S, positions_BS, x_BSM),
            token_mask=token_mask_BS,
            position_bias=position_bias(self.encoder.config, self.encoder.relative_bias, S, S),
            observe=observe,
            attention_override=attention_override,
            recompute=recompute,
        )
        memory_BSM: Tensor = self.encoder(x_BSM, context)
        return memory_BSM

    def attention_call(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """The call of ``attend`` that ``layer`` makes with the q, k, v of an observer.

        For sequences without padding: ``attend(call.q, call.k, call.v, **call.spec,
        return_weights=True)`` gives the weights of the layer whatever its choice, window, cap, sink
        or position bias.
        """
        bias = position_bias(self.config, self.relative_bias, q.shape[2], k.shape[2])
        attention = self.attention(layer)
        if attention.sink_map is not None:
            raise ValueError(
                "the sinks of this model are computed from its stream, which queries and keys do "
                'not show: sink_score="token" is not supported here.'
            )
        context = ForwardContext(position_bias=bias)
        return attention.attention_call(q, k, v, context, sink=attention.sink_scores(q))

    def attention(self, layer: int) -> Attention:
        """The self-attention of ``layer``; several layers may share one (ALBERT)."""
        block = self.blocks[layer * len(self.blocks) // self.config.layers]
        assert isinstance(block, Block)
        if not isinstance(block.attention, Attention):
            raise ValueError(f"layer {layer} is a gated DeltaNet, without attention to keys.")
        return block.attention

    def pool(self, stream_BTM: Tensor) -> Tensor:
        """A vector per sequence, from the hidden state of its first position: -> (B, M)."""
        if self.pooler is None:
            raise ValueError("this model has no pooler; build it with pooler=True.")
        pooled_BM: Tensor = self.pooler(stream_BTM[:, 0]).tanh()
        return pooled_BM

    def balance(self) -> Tensor | None:
        """The load-balancing loss of the last training pass, mean over layers; 1 for even use.

        None where there are no experts. Add a small multiple of it to the loss
        (fenchel/model/mlp.py).
        """
        experts = (m for m in self.modules() if isinstance(m, MixtureOfExperts))
        losses = [m.balance for m in experts if m.balance is not None]
        return torch.stack(losses).mean() if losses else None

    def _require_ids(self, ids_BT: Tensor, slots: int, token_mask_BS: Tensor | None) -> None:
        if ids_BT.ndim != 2 or ids_BT.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got a tensor of {tuple(ids_BT.shape)}."
            )
        if slots > self.config.context:
            raise ValueError(
                f"{slots} positions were given and the model reads {self.config.context}; shorten "
                "the sequence"
                + (
                    "."
                    if self.pos_embed is not None
                    else f", or read on with model.with_context({slots})."
                )
            )
        if token_mask_BS is None:
            return
        shape = (ids_BT.shape[0], slots)
        if token_mask_BS.dtype != torch.bool or tuple(token_mask_BS.shape) != shape:
            raise ValueError(
                f"token_mask should be bool of shape {shape}, one per slot, "
                f"got {token_mask_BS.dtype} of {tuple(token_mask_BS.shape)}."
            )

    def _embed(
        self, ids_BT: Tensor, start: int, positions_BT: Tensor | None, types_BT: Tensor | None
    ) -> Tensor:
        """The input of the first block; ``start`` positions are in the cache."""
        x: Tensor = _lookup(self.embed, ids_BT)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        end = start + ids_BT.shape[1]
        if self.pos_embed is not None:
            table = self.pos_embed.weight
            x = x + (table[start:end] if positions_BT is None else table[positions_BT])
        elif self.config.positions == "sinusoidal":
            at = torch.arange(start, end, device=x.device) if positions_BT is None else positions_BT
            x = x + sinusoids(at, x.shape[-1]).to(x.dtype).to(x.device)
        if self.type_embed is not None:
            x = x + (
                self.type_embed.weight[0]
                if types_BT is None
                else _lookup(self.type_embed, types_BT, "types")
            )
        elif types_BT is not None:
            raise ValueError(
                "types_BT was given to a model without types; build it with token_types."
            )
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = x if self.embed_proj is None else self.embed_proj(x)
        p = self.config.dropout
        return dropout(x, p, self.training) if p else x

    def _per_layer(self, ids_BT: Tensor, x_BTM: Tensor) -> Tensor | None:
        """The further embedding of every layer, (B, T, L, P)."""
        if self.per_layer_embed is None or self.per_layer_proj is None:
            return None
        assert self.per_layer_norm is not None
        shape = *ids_BT.shape, self.config.layers, self.config.per_layer_width
        projected = self.per_layer_proj(x_BTM).view(shape) * self.config.width**-0.5
        looked_up = self.per_layer_embed(ids_BT).view(shape) * self.config.per_layer_width**0.5
        e_BTLP: Tensor = (self.per_layer_norm(projected) + looked_up) * 0.5**0.5
        return e_BTLP

    def _rotary(
        self, start: int, end: int, positions_BT: Tensor | None, x_BTM: Tensor
    ) -> tuple[Angles | None, Angles | None]:
        """Rotary angles in layers without a window and in those with one."""
        if self.config.positions != "rotary":
            return None, None

        def angles(table: RotaryTable) -> Angles:
            if positions_BT is None:
                return table.between(start, end, x_BTM)
            return table.at(positions_BT, end, x_BTM)

        everywhere, local = self._rotary_tables
        rotary, config = angles(everywhere), self.config
        alike = config.rotary_local_base is None and config.full_head_size is None
        return rotary, rotary if alike else angles(local)

    def _query_scale(
        self, start: int, end: int, positions_BT: Tensor | None, x_BTM: Tensor
    ) -> Tensor | None:
        """The factor on queries by position, (T, 1) or (B, 1, T, 1); None where it is 1.

        Under temperature="log" it is log n, which every layer multiplies by numbers of its own.
        """
        config = self.config
        if config.temperature == "none":
            return None
        at = torch.arange(start, end, device=x_BTM.device) if positions_BT is None else positions_BT
        if config.temperature == "log":
            return log_length(at).to(x_BTM.dtype)
        step, offset = config.temperature_step, config.temperature_offset
        if config.context + offset <= step:
            return None
        return stepped_length(at, config.temperature_growth or 0.1, step, offset).to(x_BTM.dtype)

    def lm_head_input(self, x_BTM: Tensor) -> Tensor:
        """The output of the last block as the LM head takes it: (B, T, M), or (B, T, E)."""
        if self.norm is not None:
            x_BTM = self.norm(x_BTM)
        if self.lm_head_proj is not None and self.lm_head_norm is not None:
            x_BTM = self.lm_head_norm(ACTIVATIONS[self.config.mlp](self.lm_head_proj(x_BTM)))
        elif self.embed_proj is not None and self.lm_head is None:
            x_BTM = x_BTM @ self.embed_proj.weight  # tied: back by the transposed map
        scale = self.config.logit_scale
        return x_BTM if scale == 1.0 else x_BTM * scale

    def logits(self, x_BTM: Tensor) -> Tensor:
        """The LM head, on what a pass with ``return_hidden`` returns: (B, T, M) -> (B, T, V)."""
        if not self.config.lm_head:
            raise ValueError(
                "this model has no LM head and hence no logits; call it with return_hidden=True "
                "for its hidden states."
            )
        logits_BTV = linear(x_BTM, self.lm_head_weight, self.lm_head_bias)
        c = self.config.logit_softcap
        return logits_BTV if c is None else c * torch.tanh(logits_BTV / c)

    @property
    def lm_head_weight(self) -> Tensor:
        """The matrix of the LM head, (V, M): the embedding where the two are tied."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    @property
    def lm_head_is_linear(self) -> bool:
        """Whether the logits are ``x @ lm_head_weight.T``, without a bias or a soft cap."""
        return self.lm_head_bias is None and self.config.logit_softcap is None

    @property
    def tied_embedding(self) -> nn.Embedding | None:
        """The token embedding if its weight is also that of the LM head, else None."""
        return self.embed if self.lm_head is None else None

    def attention_layers(self) -> list[Attention]:
        """The self-attention of every layer that has one, in order.

        A block that serves several layers is repeated.
        """
        repeats = self.config.layers // len(self.blocks)
        layers = (block.attention for block in self.blocks if isinstance(block, Block))
        return [layer for layer in layers if isinstance(layer, Attention) for _ in range(repeats)]

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw every parameter again (fenchel/model/initialisation.py)."""
        if not self.embed.weight.is_meta and (trouble := post_norm_trouble(self.config)):
            warnings.warn(trouble, stacklevel=3)
        initialise(self, self.config, generator)
        with torch.no_grad():
            if self.lm_head is not None and self.config.initial == "zero":
                self.lm_head.weight.zero_()
            if self.lm_head_bias is not None:
                self.lm_head_bias.zero_()


def token_positions(token_mask_BS: Tensor) -> Tensor:
    """The position of every slot: the number of tokens before it, (B, S) -> (B, S).

    >>> token_positions(torch.tensor([[False, False, True, True]])).tolist()
    [[0, 0, 0, 1]]
    """
    return (token_mask_BS.cumsum(-1) - 1).clamp(min=0)


def segment_positions(segments_BT: Tensor) -> Tensor:
    """The position of every slot in its own document: (B, T) -> (B, T).

    >>> segment_positions(torch.tensor([[0, 0, 0, 1, 1, 2]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    slots_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    first_BT = torch.zeros_like(segments_BT)
    begins_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    first_BT[:, 1:] = torch.where(begins_BT, slots_T[1:], 0)
    return slots_T - first_BT.cummax(1).values


def _lookup(table: nn.Embedding, ids: Tensor, what: str = "ids") -> Tensor:
    try:
        rows: Tensor = table(ids)
    except IndexError:
        raise ValueError(
            f"{what} run from {int(ids.min())} to {int(ids.max())} and the model has "
            f"0 to {table.num_embeddings - 1}; use the tokenizer it was trained with."
        ) from None
    return rows


_DRAWS = (
    *(Tensor.normal_, Tensor.uniform_),
    *(init.normal_, init.uniform_, init.kaiming_uniform_),
)


def meta_model(config: ModelConfig) -> Transformer:
    """A model on the meta device: shapes without values.

    >>> meta_model(ModelConfig(vocabulary=50_000)).embed.weight.device.type
    'meta'
    """
    with _SkipMetaDraws(), torch.device("meta"):
        return Transformer(config)


class _SkipMetaDraws(TorchFunctionMode):
    """Leaves out random draws into meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS:
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs or {})


def _shallow(module: Module) -> Module:
    """A copy that shares parameters and submodules, any of which can be set on it alone."""
    other = copy(module)
    other._modules, other._parameters = dict(module._modules), dict(module._parameters)
    return other


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode, and each of its modules back afterwards.

    >>> model = nn.Dropout(0.5)
    >>> with evaluating(model):
    ...     model.training
    False
    >>> model.training
    True
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
