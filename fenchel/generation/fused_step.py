"""Steps of fixed shapes on a GPU: the fused step of a plain decoder, and its recording.

On a GPU a decoding step is hundreds of small kernels, and launching each takes longer than running
it. A CUDA graph launches all of them at once, and needs the same memory and the same shapes at
every step: a cache whose numbers of tokens are in device memory (generation/kv_cache.py).

**Fused step.** A step is the forward pass of the model, or for a plain decoder five kernels per
layer:

    qkv   = norm(x) W_qkv^T                             kernels/thin_matmul.py
    o     = attend(rotary(q), keys with rotary(k))      kernels/decode_attention.py; stores k and v
    x     = x + o W_o^T                                 kernels/thin_matmul.py
    wide  = f(norm(x) W_gate^T) * (norm(x) W_up^T)
    x     = x + wide W_down^T
    z     = norm(x) lm_head^T

With one token a step takes as long as reading the weights once, if nothing else is in the way: each
kernel reads one or two matrices whole and computes its own input from the stream. 22 layers of
width 2048 with a vocabulary of 32,000 are 2.07 GB in bfloat16. Above ``THIN_ROWS`` sequences the
products are those of torch, with the norm and the activation as kernels of their own: nine kernels
per layer. Other choice maps than softmax are solved by the host, which a recording cannot wait for;
the fused step solves entmax and sparsemax on the device. An int8 cache stays in bytes and is
widened inside the kernel.

**Recording.** ``RecordedStep`` has a recording per bucket of rows; all of them read and write the
first rows of the same cache. Small buckets have a second one for steps in which all sequences are
short, with one kernel for softmax attention instead of two. The token of every row is drawn inside
the recording by the row's own settings (generation/sampling.py), and the next step reads it, so
that the host may launch a step before it has read the tokens of the step before.

B rows, S slots, M width of the stream, H heads, G heads of keys, D width per head, F width of the
MLP.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention.spec import SOFTMAX, AttentionSpec
from fenchel.generation.kv_cache import DenseStore, Int8Store, KVCache
from fenchel.generation.plain_decoder import (
    LinearWeights,
    PlainNorm,
    block_weights,
    decode_alpha,
    plain_norm,
    why_not_plain,
)
from fenchel.generation.sampling import RowSampling, Sampling, draw
from fenchel.model import Transformer
from fenchel.model.attention import Attention
from fenchel.model.forward_context import AttentionOverride, Observer
from fenchel.model.rotary_table import RotaryTable

if TYPE_CHECKING:
    from fenchel.kernels.thin_matmul import NormWeights

THIN_ROWS = 1
"""Sequences up to which reading the weights dominates; above, torch's products are faster. A step
of 22 layers of width 2048 on an H200 takes 0.83, 1.16, 1.65, 2.73 ms by ``thin_matmul`` for 1, 2,
4, 8 sequences."""
PRODUCT_ROWS = 32
"""Fewest rows of torch's products: the same step takes 1.27 to 1.35 ms by products of 8 rows, and
0.89 ms by products of 32, for which its library has better kernels."""
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_HEAD = 256
"""Blocks of keys and values of wider heads exceed the shared memory of a program."""


def why_not_fused(model: Transformer) -> str | None:
    """The first reason why the fused step cannot serve a model, or None."""
    if model.config.head_width > WIDEST_HEAD:
        return f"its heads are {model.config.head_width} wide, and the most is {WIDEST_HEAD}"
    table = model.lm_head_weight
    if table.device.type != "cuda" or table.dtype not in FUSED_DTYPES:
        return f"it is in {table.dtype} on {table.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not all(p.is_contiguous() for p in model.parameters()):
        return "a parameter is not contiguous"
    return why_not_plain(model, sparse=True)


class FusedStep:
    """One step of a plain decoder for the rows of a ``cache``, which reads ``token_B``.

    ``tokens`` as in ``attend_decode``: how many the longest sequence has at most. ``steer`` is
    added to the stream after layers, (B, M) each.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        token_B: Tensor,
        tokens: int | None = None,
        steer: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        c, table, S = model.config, model.lm_head_weight, cache.positions
        assert cache.token_B is not None
        self.cache, self.token_B, self.tokens, self.steer = cache, token_B, tokens, steer
        self.number_B = cache.token_B
        self.embed, self.lm_head = model.embed.weight, LinearWeights(table.t(), None)
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.activation, self.norm = c.mlp, _norm(plain_norm(model.norm))
        self.scale = AttentionSpec(scale=c.score_scale).scale_for(c.head_width)
        self.rotary: tuple[Tensor, Tensor] | None = None
        if c.positions == "rotary":
            cos, sin = RotaryTable(c).between(0, S, table)
            self.rotary = cos.to(table.dtype).contiguous(), sin.to(table.dtype).contiguous()
        self.layers = [block_weights(block) for block in model.blocks]
        self.norms = [(_norm(layer.attention_norm), _norm(layer.mlp_norm)) for layer in self.layers]
        B, H, G, D = len(token_B), c.heads, c.groups, c.head_width
        self.rows, self.thin = B, B <= THIN_ROWS
        # Rows beyond B are in torch's products alone: zeros go in, and what comes out is not read.
        P = B if self.thin else max(B, PRODUCT_ROWS)
        new = table.new_zeros
        self.x, self.qkv, self.o = new(P, c.width), new(P, (H + 2 * G) * D), new(P, H * D)
        self.wide, self.logits = new(P, c.mlp_width), new(P, c.vocabulary)
        self.y, self.gate, self.up = new(P, c.width), new(P, c.mlp_width), new(P, c.mlp_width)

    def step(self) -> Tensor:
        """Logits after the token, (B, V); the next step overwrites them."""
        x, logits_BV = self.x[: self.rows], self.logits[: self.rows]
        torch.index_select(self.embed, 0, self.token_B, out=x)
        if self.pos_embed is not None:
            x.add_(self.pos_embed[self.number_B.clamp(min=0)])
        for number, (layer, (before, between)) in enumerate(
            zip(self.layers, self.norms, strict=True)
        ):
            self._matmul(layer.qkv, self.qkv, before)
            self._attend(number)
            self._matmul_add(layer.out, self.o)
            self._mlp(layer.gate, layer.up, between)
            self._matmul_add(layer.down, self.wide, self.steer.get(number))
        self._matmul(self.lm_head, self.logits, self.norm)
        return logits_BV

    def _attend(self, number: int) -> None:
        from fenchel.kernels.decode_attention import CacheTensors, attend_decode

        (keys, values, _, _), choice = self.cache.layers[number], self.layers[number].choice
        rows = slice(self.rows)
        if isinstance(keys, Int8Store) and isinstance(values, Int8Store):
            scales = keys.s[rows, ..., 0], values.s[rows, ..., 0]
            tensors = CacheTensors(keys.memory[rows], values.memory[rows], *scales)
        else:
            assert isinstance(keys, DenseStore)
            assert isinstance(values, DenseStore)
            tensors = CacheTensors(keys.x[rows], values.x[rows])
        alpha, beta = decode_alpha(choice), getattr(choice, "beta", None)
        assert alpha is not None
        assert beta is not None
        attend_decode(
            self.qkv[rows],
            tensors,
            self.number_B,
            self.o[rows],
            angles=self.rotary,
            scale=self.scale * beta,
            alpha=alpha,
            tokens=self.tokens,
        )

    def _matmul(self, weights: LinearWeights, y_BN: Tensor, norm: "NormWeights") -> None:
        """y = norm(x) W^T + b."""
        from fenchel.kernels.thin_matmul import matmul, normalise

        if self.thin:
            matmul(self.x, weights.weight, weights.bias, y_BN, norm=norm)
        else:
            normalise(self.x[: self.rows], norm, self.y[: self.rows])
            weights.into(y_BN, self.y)

    def _matmul_add(
        self, weights: LinearWeights, y_BK: Tensor, steer_BM: Tensor | None = None
    ) -> None:
        """x = x + y W^T + b, and + v where the layer is steered."""
        from fenchel.kernels.thin_matmul import matmul_add

        if self.thin:
            matmul_add(self.x, y_BK, weights.weight, weights.bias, steer_BN=steer_BM)
            return
        weights.add_to(self.x, y_BK)
        if steer_BM is not None:
            self.x[: self.rows].add_(steer_BM)

    def _mlp(self, gate: LinearWeights | None, up: LinearWeights, norm: "NormWeights") -> None:
        """wide = f(norm(x) W_gate^T + b) * (norm(x) W_up^T + c)."""
        from fenchel.kernels.thin_matmul import activate, gated_matmul, normalise

        f = self.activation
        if self.thin:
            pair = None if gate is None else (gate.weight, gate.bias)
            gated_matmul(self.x, pair, (up.weight, up.bias), self.wide, activation=f, norm=norm)
            return
        rows = slice(self.rows)
        normalise(self.x[rows], norm, self.y[rows])
        if gate is not None:
            gate.into(self.gate, self.y)
        up.into(self.up, self.y)
        gate_BF = None if gate is None else self.gate[rows]
        activate(gate_BF, self.up[rows], self.wide[rows], activation=f)


def _norm(module: PlainNorm) -> "NormWeights":
    from fenchel.kernels.thin_matmul import NormWeights

    if isinstance(module, nn.LayerNorm):
        return NormWeights(module.weight, module.bias, module.eps, centred=True)
    return NormWeights(module.weight, None, module.eps, centred=False)


Step = Callable[[], Tensor]
StepRecorder = Callable[[Step, torch.device], Step]


def capture_graph(step: Step, device: torch.device) -> Step:
    """A step as a CUDA graph. Capturing runs the step, so its memory is to be filled afterwards.

    The graph replays in the memory of the step, which the caller keeps: only what is allocated
    during the capture belongs to the graph.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what a first call allocates is allocated before capturing
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


class PendingTokens(NamedTuple):
    """Tokens requested from the device, (B,); -1 where the largest logit is not finite.

    Their copy to the host is requested too, so that ``wait`` does not wait for the tokens that are
    requested next.
    """

    on_host: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, token_B: Tensor) -> "PendingTokens":
        """Request the copy of these tokens to the host."""
        if not token_B.is_cuda:
            return cls(token_B.clone(), None)
        on_host = token_B.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(token_B.device))
        return cls(on_host, copied)

    def wait(self) -> Tensor:
        """The tokens on the host, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host


class RowState(NamedTuple):
    """What a recorded step knows of every row, in device memory, (B,) of int64."""

    number: Tensor
    """Tokens that the cache has of it; below 0 for a row that a fused step leaves out."""
    left: Tensor
    """Tokens that left the cache before: what is drawn is token number + left."""
    active: Tensor
    """1 where the number counts on with every step, else 0."""
    token: Tensor
    """What the next step reads."""
    drawn: Tensor
    """What the last step drew: -1 where it could not."""


class RecordedStep:
    """Recorded steps of the first rows of a cache: one per bucket of rows.

    A step reads the token of every row and draws the next, which the step after it reads:
    ``set_rows`` is needed only when a row joins, leaves or reads another token than the drawn one.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        buckets: Sequence[int],
        *,
        fused: bool,
        steered: Collection[int] = (),
        record: StepRecorder,
    ) -> None:
        self.device, self.fused, self.positions = cache.device, fused, cache.positions
        self._kernel = cache.device.type == "cuda" and find_spec("triton") is not None
        B = buckets[-1]
        zeros = torch.zeros(5, B, dtype=torch.long, device=self.device)
        self.rows = RowState(*zeros.unbind())
        free = [(Sampling(temperature=0.0), 0)] * B
        self.settings = RowSampling(*(x.to(self.device) for x in RowSampling.of(free)))
        self.caches = {
            rows: cache.select(slice(0, rows), [0] * rows, token_B=self.rows.number[:rows])
            for rows in buckets
        }
        table = model.embed.weight
        self.vectors = {layer - 1: table.new_zeros(B, model.config.width) for layer in steered}
        """What is added to the stream after layers, numbered from 0."""
        self._fused: list[FusedStep] = []
        """Held here, since a graph does not keep the memory that it replays in."""
        self._steps: dict[tuple[int, int], Step] = {}
        """Recordings by their rows and by how many tokens a sequence has at most, ascending."""
        # Recording runs the steps, so no row holds a sequence yet.
        for rows in buckets:
            for tokens in self._lengths(model, rows):
                fused_step = None
                if fused:
                    token_B = self.rows.token[:rows]
                    vectors = {layer: v[:rows] for layer, v in self.vectors.items()}
                    fused_step = FusedStep(model, self.caches[rows], token_B, tokens, vectors)
                    self._fused.append(fused_step)
                own = None if fused else model  # a fused step does not keep its model alive
                step = partial(self._forward, own, rows, fused_step)
                self._steps[rows, tokens] = record(step, self.device)

    def _lengths(self, model: Transformer, rows: int) -> list[int]:
        """How many tokens a sequence has at most in the recordings of a bucket, ascending."""
        S = self.positions
        softmax = any(
            isinstance(module, Attention) and isinstance(module.choice, type(SOFTMAX))
            for module in model.modules()
        )
        if not (self.fused and softmax):
            return [S]
        from fenchel.kernels.decode_attention import SHORT, one_per_head

        return [SHORT, S] if SHORT < S and one_per_head(rows * model.config.groups, 1) else [S]

    def set_rows(
        self,
        numbers: Sequence[int],
        left: Sequence[int],
        active: Sequence[bool],
        tokens: Sequence[int],
    ) -> None:
        """The state of all rows; a token of -1 is the one that the last step has drawn."""
        # A fused step reads and writes nothing for a row whose number is below 0.
        free = [n if on or not self.fused else -1 for n, on in zip(numbers, active, strict=True)]
        new = self._upload(torch.tensor([free, [*left], [*map(int, active)], [*tokens]]))
        self.rows.number.copy_(new[0])
        self.rows.left.copy_(new[1])
        self.rows.active.copy_(new[2])
        self.rows.token.copy_(torch.where(new[3] >= 0, new[3], self.rows.token))

    def set_sampling(self, settings: RowSampling) -> None:
        """How the first rows draw their tokens."""
        for mine, new in zip(self.settings, settings, strict=True):
            mine[: len(new)] = self._upload(new)

    def set_vectors(self, vectors: Mapping[int, Tensor]) -> None:
        """What is added to the streams of the first rows, (B, M) by layer; zero where none is."""
        for layer, table in self.vectors.items():
            table.zero_()
            if layer in vectors:
                table[: len(vectors[layer])] = vectors[layer]

    def _upload(self, x: Tensor) -> Tensor:
        """On the device, without a wait for what it computes."""
        if self.device.type != "cuda":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)

    def step(self, rows: int, *, longest: int) -> Tensor:
        """Logits of the first ``rows``, (B, V); ``drawn`` is then drawn from them.

        ``longest`` is how many tokens the longest sequence has with the one that is read. The next
        step overwrites the logits.
        """
        return next(
            step for (B, tokens), step in self._steps.items() if rows == B and tokens >= longest
        )()

    def model_step(
        self,
        model: Transformer,
        rows: int,
        observe: Observer | None,
        override: AttentionOverride | None,
    ) -> Tensor:
        """The same by the model itself, with an observer or an override of its attention."""
        return self._forward(model, rows, None, observe, override)

    def _forward(
        self,
        model: Transformer | None,
        rows: int,
        fused: FusedStep | None,
        observe: Observer | None = None,
        override: AttentionOverride | None = None,
    ) -> Tensor:
        state = RowState(*(x[:rows] for x in self.rows))
        if fused is not None:
            logits_BV = fused.step()
        else:
            assert model is not None
            steer = {layer: v[:rows].unsqueeze(1) for layer, v in self.vectors.items()}
            token_B1, cache = state.token.unsqueeze(-1), self.caches[rows]
            logits_BV = model(
                token_B1,
                cache=cache,
                observe=observe,
                attention_override=override,
                steer=steer,
                last=True,
            )[:, -1]
        state.number.add_(state.active)
        settings = RowSampling(*(x[:rows] for x in self.settings))
        if self._kernel:
            from fenchel.kernels.draw_token import draw_token

            draw_token(logits_BV, settings, state.number, state.left, state.token, state.drawn)
        else:
            state.drawn.copy_(draw(logits_BV, settings, state.number + state.left))
            state.token.copy_(state.drawn.clamp(min=0))
        return logits_BV
