"""fenchel attach: replace the attention of a transformers checkpoint, with a proof."""

import json as json_format
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fenchel.cli.console import CheckpointPath, Json, Whole, require_inputs, text_path
from fenchel.files import printable, require_output

if TYPE_CHECKING:
    from fenchel.choice import Choice
    from fenchel.evaluate import Score
    from fenchel.hf import Proof

_PROBE = 32  # tokens of the text that prove the swap


def run(
    directory: CheckpointPath,
    /,
    *,
    map: str | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    text: str | None = None,
    context: Whole = 256,
    tokens: Whole = 4096,
    out: Path | None = None,
    json: Json = False,
) -> int:
    """Swap the attention of a transformers checkpoint, and prove that the swap took effect.

    Parameters
    ----------
    directory
        A checkpoint of transformers: config.json and weights as safetensors. No code in it is run
        and nothing is downloaded.
    map
        A choice map, such as softmax or entmax (fenchel doctor lists them); when left out, the one
        that the checkpoint was saved with.
    alpha
        The exponent of entmax, 1.5 when left out.
    beta
        The inverse temperature of any map but hard, 1 when left out.
    text
        A text to read with both attentions: "sotu", "kjv", a file, a folder or a .jsonl file.
    context
        Number of its tokens that the model reads at once.
    tokens
        Largest number of its tokens that are predicted.
    out
        Save the checkpoint with the map in its config to this directory, which must not exist or
        be empty. Weights, tokenizer and generation settings are copied unchanged.
    """
    require_inputs(directory, text)
    if not (directory / "config.json").exists():
        ours = (directory / "checkpoints").is_dir()
        advice = f"; it is a run, and fenchel convert {directory} OUT writes one" if ours else ""
        raise ValueError(f"{directory} is not a checkpoint of transformers{advice}.")
    if out is not None:
        require_output(out, folder=True, new=True, reads=[directory, text_path(text)])

    from fenchel.checkpoints.directory import open_directory
    from fenchel.checkpoints.hf_export import write_copy
    from fenchel.checkpoints.tokenizer import describe_beginning, read_tokenizer
    from fenchel.choice.by_name import FIELD
    from fenchel.evaluate import text_ids
    from fenchel.hf import load_transformers_model, prove
    from fenchel.hf.loader import one_sentence

    checkpoint = open_directory(directory)
    model: Any = load_transformers_model(checkpoint, bare_otherwise=False)
    choice = _choice(model, map, alpha, beta)
    ids, size, begin = None, 0, ""
    if text is not None:
        _require_next_token(model)
        tokenizer = read_tokenizer(directory, _vocabulary(model), checkpoint.config)
        ids, size = text_ids(tokenizer, text, limit=tokens)
        begin = describe_beginning(tokenizer)
    with one_sentence(f"run this {type(model).__name__}"):
        proof = prove(model, choice, _probe(model, ids))
    record = _plain(type(model).__name__, proof)
    lines = _lines(directory, type(model).__name__, proof)
    if ids is not None:
        with one_sentence(f"run this {type(model).__name__}"):
            scores = {
                name: _score(model, attention, ids, size, context, tokens)
                for name, attention in (("eager", None), (record["map"]["map"], choice))
            }
        record |= {"begin": begin, "text": {n: one._asdict() for n, one in scores.items()}}
        lines += [*_score_lines(scores), begin]
    if out is not None:
        write_copy(checkpoint, out, {FIELD: record["map"]})
        lines.append(
            f"saved to {printable(out, 4096)} with the map in its config, where every command "
            "of fenchel finds it; transformers alone ignores it and computes a softmax"
        )
    print(json_format.dumps(record) if json else "\n".join(lines))
    return 0


def _choice(model: Any, map: str | None, alpha: float | None, beta: float | None) -> "Choice":
    """The map that was named, or the one the checkpoint was saved with."""
    from fenchel.choice.by_name import FIELD, by_name, choice_from_record, maps_with

    options = {"alpha": alpha, "beta": beta}
    settings = {name: value for name, value in options.items() if value is not None}
    for setting in settings:
        users = maps_with(setting)
        if map not in users:
            raise ValueError(
                f"--{setting} is for --map {', '.join(users)}, got --map {map}; leave it out."
            )
    if map is not None:
        return by_name(map, **settings)
    stored = getattr(model.config, FIELD, None)
    if stored is None:
        raise ValueError("the checkpoint was not saved with a map of fenchel; name one with --map.")
    return choice_from_record(stored)


def _require_next_token(model: Any) -> None:
    kind = type(model).__name__
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return
    if model.config.get_text_config() is not model.config:
        why = "reads more than text, and a loss is measured for models of text alone"
    else:
        why = "does not predict the next token, so it has no loss on a text"
    raise ValueError(f"{kind} {why}; leave out --text.")


def _vocabulary(model: Any) -> int:
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise ValueError(f"{type(model).__name__} has no vocabulary; attach needs a model of text.")
    return size


def _probe(model: Any, ids: Any) -> dict[str, Any]:
    """The first tokens of the text, or tokens drawn at random, as the model takes them."""
    import torch

    config = model.config.get_text_config()
    length = min(_PROBE, getattr(config, "max_position_embeddings", None) or _PROBE)
    if ids is not None and len(ids) > 2:
        rows = torch.from_numpy(ids[:length].astype("int64"))[None]
    else:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(_vocabulary(model), (2, length), generator=generator)
    inputs = {"input_ids": rows}
    return inputs | {"decoder_input_ids": rows} if config.is_encoder_decoder else inputs


def _score(
    model: Any, choice: "Choice | None", ids: Any, size: int, context: int, tokens: int
) -> "Score":
    """How well the model predicts the text by its own attention (None), or by ``choice``."""
    from contextlib import nullcontext

    from torch import Tensor, nn

    from fenchel.evaluate import score
    from fenchel.evaluate.score import LOGITS
    from fenchel.hf import attach

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids_BT: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=ids_BT, use_cache=False).logits
            return logits

    config = model.config.get_text_config()
    context = min(context, getattr(config, "max_position_embeddings", None) or context)
    batch = max(1, min(4, LOGITS["cpu"] // (context * config.vocab_size)))
    with nullcontext() if choice is None else attach(model, choice):
        return score(Logits(), ids, bytes=size, context=context, limit=tokens, batch=batch)


def _plain(kind: str, proof: "Proof") -> dict[str, Any]:
    from fenchel.choice.by_name import choice_record

    return {
        "model": kind,
        "map": choice_record(proof.choice),
        "layers": [layer._asdict() for layer in proof.layers],
        "calls": proof.calls,
        "masks": list(proof.masks),
        "softmax_difference": proof.softmax_difference,
        "tolerance": proof.tolerance,
        "change": proof.change,
        "leak": proof.leak,
        "narrowed": proof.narrowed,
    }


def _lines(directory: Path, kind: str, proof: "Proof") -> list[str]:
    alike = Counter((one.kind, one.calls, ", ".join(one.masks)) for one in proof.layers)
    wide = max(len(name) for name, _, _ in alike)
    windows = f"The windows, of up to {proof.narrowed} tokens, are narrower here"
    return [
        f"{printable(directory, 4096)}: {kind}, every attention layer by {proof.choice}",
        f"{'layers':>6}  {'class':<{wide}}  {'calls each':>10}  mask",
        *(
            f"{count:6}  {name:<{wide}}  {calls:10}  {mask}"
            for (name, calls, mask), count in alike.items()
        ),
        f"our softmax against eager   {proof.softmax_difference:.1e}"
        f" (largest difference; {proof.tolerance:.1e} allowed)",
        f"the new map against eager   {proof.change:.1e}",
        *([] if proof.leak is None else [f"from later to earlier       {proof.leak:.1e}"]),
        *([] if proof.narrowed is None else [f"{windows}: the proof reads {_PROBE}."]),
    ]


def _score_lines(scores: Mapping[str, "Score"]) -> list[str]:
    rows = [
        f"{name:<12}{one.loss:10.4f}{one.perplexity:14.2f}{one.bits_per_byte:15.4f}"
        for name, one in scores.items()
    ]
    return ["", f"{'':<12}{'loss':>10}{'perplexity':>14}{'bits per byte':>15}", *rows]
