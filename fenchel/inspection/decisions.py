"""Certified decisions: how far token embeddings may move before the next token changes.

    certified <= the smallest change that changes the decision <= attacked

``certified`` follows from the Taylor certificate of fenchel/sensitivity/decision.py; ``attacked``
is the length of a change that was found (fenchel/sensitivity/decision_attack.py) and is returned as
the witness. The change is one of the input of the first block, in float64: embeddings with whatever
the model adds to them. The decision at a position is the set of the ``keep`` largest logits.

The certificate is about the exact function of the stored weights; a forward pass in float32 differs
from it by its own rounding, which is not covered.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.data import ProgressCallback
from fenchel.files import printable
from fenchel.inspection.certificates import (
    block_layer,
    norm_layer,
    require_agreement,
    transformer_of,
    why_no_block,
)
from fenchel.inspection.our_model import record_pass
from fenchel.inspection.trace import InspectedModel, token_text, tokenize_text
from fenchel.inspection_result import DecisionCertification, DecisionRow
from fenchel.model import Transformer, evaluating
from fenchel.sensitivity.decision import (
    DecisionBound,
    DecisionNetwork,
    OutOfTime,
    Radius,
    certified_radii,
    require_size,
    rivals_of,
)
from fenchel.sensitivity.decision_attack import nearest_change
from fenchel.sensitivity.layers import (
    Chain,
    LinearLayer,
    NormLayer,
    Residual,
    with_dtype,
)
from fenchel.sensitivity.token_lipschitz import largest_stretch, logit_bound

_SHARE = 0.7  # of a budget, for the certificate
_SHORTEST = 8  # tokens of the first prefix within a budget; each is twice the one before it


@dataclass(frozen=True, eq=False)
class PositionDecision:
    """The decision after the tokens up to ``position``."""

    position: int
    kept: list[int]
    """The ``keep`` tokens with the largest logits."""
    rival: int
    """The nearest other token, by margin over gradient."""
    margin: float
    """The least margin of a kept token over another, in logits, rounded down."""
    certified: float
    attacked: float
    """inf where no change was found."""
    first_order: float
    """Margin over gradient: no bound; nan where the gradient was not reached."""
    witness: Tensor | None
    """A change of the embeddings, (position + 1, M), of length ``attacked``."""
    parts: dict[str, float]
    """What the margin lost at the certified radius, by kind of remainder."""
    stages: list[float]
    """The same by stage of the network, without the gradient and the last norm."""
    searched: bool = True
    """False where a budget ended before a radius was found: ``certified`` is 0."""
    attempted: bool = True
    """False where it ended before an attack was made: ``attacked`` is inf."""

    @property
    def ratio(self) -> float:
        """certified / attacked."""
        return self.certified / self.attacked if 0.0 < self.attacked < math.inf else 0.0


@dataclass(frozen=True, eq=False)
class Decision:
    """Both sides of the distance to another decision, at every position."""

    norm: str
    keep: int
    positions: list[PositionDecision]
    network: DecisionNetwork
    embeddings: Tensor
    seconds: float
    complete: bool
    """False where a budget ended the search."""

    @property
    def certified(self) -> Tensor:
        """(positions,)."""
        return torch.tensor([one.certified for one in self.positions], dtype=torch.float64)

    @property
    def attacked(self) -> Tensor:
        """(positions,)."""
        return torch.tensor([one.attacked for one in self.positions], dtype=torch.float64)

    def replay(self, index: int) -> tuple[list[int], float]:
        """The decision at the witness of a position, and the length of that change."""
        one = self.positions[index]
        if one.witness is None:
            raise ValueError(f"no change was found at position {one.position}.")
        X = self.embeddings[: one.position + 1] + one.witness
        logits = self.network.prefix(len(X))(X)[-1]
        return logits.topk(self.keep).indices.tolist(), length(one.witness, self.norm)


def length(moves: Tensor, norm: str) -> float:
    """The length of a change (n, M) in a norm."""
    rows = moves.norm(dim=-1)
    return float(rows.amax() if norm == "token" else rows.norm())


@torch.no_grad()
def certify_decision(
    model: Transformer,
    ids: Tensor,
    *,
    norm: str,
    keep: int = 1,
    budget: float | None = None,
    positions: Sequence[int] | None = None,
    rivals: int = 8,
    progress: ProgressCallback | None = None,
) -> Decision:
    """How far the embeddings of ids (T,) may move before a decision changes, from both sides.

    ``norm`` is "all" (all tokens together), "token" (each token) or "one" (the last token of each
    prefix alone). ``keep`` is the number of largest logits that must stay the largest. ``budget``
    is in seconds; when it is spent, what is known is returned. Prefixes of 8, 16, 32 ... tokens
    are certified in turn within it, each for the positions that the one before it lacks. The attack
    aims at the ``rivals`` nearest tokens and counts a change to any.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> config = ModelConfig(vocabulary=16, width=8, layers=1, heads=2, initial="normal")
    >>> model = Transformer(config, generator=torch.Generator().manual_seed(0))
    >>> decision = certify_decision(model, torch.tensor([3, 1, 2]), norm="all")
    >>> bool((decision.certified <= decision.attacked).all())
    True
    """
    begin = time.monotonic()
    deadline = math.inf if budget is None else begin + budget
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"a decision is about one sequence of ids (T,), got {tuple(ids.shape)}.")
    if not 1 <= keep < model.config.vocabulary:
        raise ValueError(f"keep is 1 to {model.config.vocabulary - 1}, got {keep}.")
    chosen = list(range(len(ids))) if positions is None else sorted(set(positions))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < len(ids):
        raise ValueError(f"positions are 0 to {len(ids) - 1}, got {positions}.")
    require_size(chosen[-1] + 1, model.config.width, 2 * model.config.layers)
    network, X = network_of(model, ids)
    X = X[: chosen[-1] + 1]
    network = network.prefix(len(X))
    say = progress or (lambda *_: None)
    middle = math.inf if budget is None else begin + _SHARE * budget
    radii: dict[int, Radius] = {}

    def search(done: int) -> None:
        say("certificates", len(radii) + done, len(chosen))

    for group in [chosen] if budget is None else _by_length(chosen):
        cut = group[-1] + 1
        say("setup", 0, 0)
        try:
            bound = DecisionBound(
                *(network.prefix(cut), X[:cut]),
                keep=keep,
                deadline=middle,
                progress=lambda done, total: say("setup", done, total),
            )
        except OutOfTime:
            break
        radii |= certified_radii(bound, norm, group, search)
        del bound  # before the next one, which is larger
    searched = len(radii) == len(chosen) and time.monotonic() < middle
    margins = rivals_of(network, network.streams(X)[-1], keep)
    results = []
    for done, t in enumerate(chosen):
        say("attacks", done, len(chosen))
        at, radius = margins[t], radii.get(t)
        attempted = time.monotonic() < deadline
        change = None
        if attempted:
            change = nearest_change(
                network.prefix(t + 1), X[: t + 1], at.kept, norm, rivals=rivals, deadline=deadline
            )
        gaps = at.margins.amin(0)
        results.append(
            PositionDecision(
                position=t,
                kept=at.kept.tolist(),
                rival=int(gaps.argmin()) if radius is None else radius.rival,
                margin=float(gaps.amin()),
                certified=0.0 if radius is None else radius.certified,
                attacked=math.inf if change is None else length(change, norm) * (1.0 + 1e-12),
                first_order=math.nan if radius is None else radius.first_order,
                witness=change,
                parts={} if radius is None or radius.bound is None else radius.bound.parts,
                stages=[] if radius is None or radius.bound is None else radius.bound.stages,
                searched=radius is not None,
                attempted=attempted,
            )
        )
    now = time.monotonic()
    complete = searched and all(one.attempted for one in results) and now < deadline
    return Decision(norm, keep, results, network, X, now - begin, complete)


def _by_length(positions: Sequence[int]) -> list[list[int]]:
    """Positions in groups that prefixes of 8, 16, 32 ... tokens serve.

    >>> _by_length([0, 7, 8, 31, 32])
    [[0, 7], [8], [31], [32]]
    """
    groups: dict[int, list[int]] = {}
    for t in positions:
        groups.setdefault((t // _SHORTEST).bit_length(), []).append(t)
    return list(groups.values())


def certify_text_decisions(
    model: InspectedModel,
    source: str,
    *,
    norm: str = "all",
    keep: int = 1,
    max_tokens: int = 16,
    budget: float | None = None,
    progress: ProgressCallback | None = None,
) -> DecisionCertification:
    """``certify_decision`` on the first tokens of ``source``, as plain values.

    ``progress`` is called with what is done, of how much.
    """
    transformer, text = decoder_of(model), tokenize_text(model, source, max_tokens)
    ids = torch.tensor(text.ids)
    found = certify_decision(
        transformer, ids, norm=norm, keep=keep, budget=budget, progress=progress
    )

    def row(one: PositionDecision) -> DecisionRow:
        moved = torch.zeros(0) if one.witness is None else one.witness.square().sum(-1)
        return DecisionRow(
            position=one.position,
            token=text.tokens[one.position],
            kept=[token_text(model.tokenizer, token) for token in one.kept],
            rival=token_text(model.tokenizer, one.rival),
            margin=one.margin,
            certified=one.certified,
            attacked=one.attacked,
            first_order=one.first_order,
            moved=[float(f"{share:.4g}") for share in (moved / moved.sum()).tolist()],
            parts=one.parts,
            stages={_stage_name(s): lost for s, lost in enumerate(one.stages)},
            searched=one.searched,
            attempted=one.attempted,
        )

    return DecisionCertification(
        subject=model.facts(),
        text=text.name,
        tokens=list(text.tokens),
        norm=norm,
        keep=keep,
        token_norm=float(found.embeddings.norm(dim=-1).mean()),
        complete=found.complete,
        rows=[row(one) for one in found.positions],
        seconds={"decisions": found.seconds},
    )


def decoder_of(model: InspectedModel) -> Transformer:
    """The Transformer whose decisions can be certified; refuses classifiers by their class."""
    named = getattr(getattr(model.model, "config", None), "architectures", None) or [""]
    if "Classification" in str(named[0]):
        raise ValueError(
            f"{model.name} is a {printable(str(named[0]))}, whose classifier fenchel does not "
            "read; decisions are certified for the next token of causal decoders."
        )
    return transformer_of(model)


def _stage_name(s: int) -> str:
    """
    >>> _stage_name(3)
    'block 2 MLP'
    """
    return f"block {s // 2 + 1} {'MLP' if s % 2 else 'attention'}"


class LogitConstant(NamedTuple):
    """How far a logit can move when no token embedding moves further than 1."""

    certified: float
    """No logit moves further, for any text."""
    attacked: float
    """The largest stretch that an attack found."""
    embedding: float
    """Mean length of the embeddings that the attack began at."""


def certify_constant(model: Transformer, ids: Tensor) -> LogitConstant:
    """A Lipschitz constant of the logits from both sides; ids (T,) are where the attack begins.

    The certified end is a function of the weights alone (fenchel/sensitivity/token_lipschitz.py).

    >>> from fenchel.model import ModelConfig, Transformer
    >>> config = ModelConfig(vocabulary=16, width=8, layers=1, heads=2, initial="normal")
    >>> model = Transformer(config, generator=torch.Generator().manual_seed(0))
    >>> constant = certify_constant(model, torch.tensor([3, 1, 2]))
    >>> 0.0 < constant.attacked <= constant.certified
    True
    """
    network, X = network_of(model, ids)
    certified = logit_bound([*network.stages, network.norm], network.head, X.shape[-1])
    attacked = largest_stretch(network, X, network.head.W.mT).gain
    return LogitConstant(certified, attacked, float(X.norm(dim=-1).mean()))


def certify_text_constant(
    model: InspectedModel, source: str, *, max_tokens: int = 16
) -> LogitConstant:
    """``certify_constant`` on the first tokens of ``source``."""
    transformer = transformer_of(model)
    return certify_constant(transformer, torch.tensor(tokenize_text(model, source, max_tokens).ids))


def network_of(model: Transformer, ids: Tensor) -> tuple[DecisionNetwork, Tensor]:
    """The model written out in float64 for ids (T,), and the input of its first block (T, M)."""
    config = model.config
    reasons = {
        f"is of kind {config.kind!r}": config.kind != "decoder",
        f"has norm_place={config.norm_place!r}": config.norm_place != "pre",
        "runs attention and MLP in parallel": config.parallel,
        "has no norm before its LM head": model.norm is None,
        "has further layers before its LM head": model.lm_head_proj is not None,
        "has embeddings of another width": model.embed_proj is not None,
        "has no LM head": not config.lm_head,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"decisions are certified for pre-norm decoders; this model {reason}.")
    records = record_pass(model, ids[None]).records
    source = model.lm_head_weight.dtype
    stages: list[Residual] = []
    for number, record in enumerate(records, 1):
        if (refused := why_no_block(record)) is not None:
            raise ValueError(f"layer {number} {refused}.")
        block = with_dtype(block_layer(record, torch.float64), torch.float64, source)
        assert isinstance(block, Chain)
        stages += [stage for stage in block.layers if isinstance(stage, Residual)]
    assert model.norm is not None
    norm = with_dtype(norm_layer(model.norm, torch.float64), torch.float64, source)
    assert isinstance(norm, NormLayer)
    bias = None if model.lm_head_bias is None else model.lm_head_bias.detach().double()
    scale = config.logit_scale
    if scale <= 0.0:
        raise ValueError("decisions are certified for a positive logit_scale.")
    head = LinearLayer(scale * model.lm_head_weight.detach().double().mT, bias)
    network = DecisionNetwork(tuple(stages), norm, head)
    X = records[0].block.x[0].double()
    require_same_logits(network, X, model, ids)
    return network, X


def require_same_logits(
    network: DecisionNetwork, X: Tensor, model: Transformer, ids: Tensor
) -> None:
    """Refuse a network whose logits at X differ from those of the model for ids (T,)."""
    logits, cap = network(X), model.config.logit_softcap
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    with torch.no_grad(), evaluating(model):
        require_agreement(logits, model(ids[None])[0].double(), "model")
