"""fenchel steer: a direction in the stream of a model, and the strength that a budget allows."""

import json as json_format
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import (
    LOADED_AS_STORED,
    Console,
    Json,
    LoadFlags,
    ModelPath,
    Switch,
    Whole,
    require_inputs,
    stages,
    text_path,
)
from fenchel.cli.inspect import numbers
from fenchel.files import printable, read_regular, require_output

if TYPE_CHECKING:
    from fenchel.data import TextTokenizer
    from fenchel.generation import Steering
    from fenchel.model import Transformer
    from fenchel.steering import Direction

_BYTES = 2**20  # of a file of texts


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DirectionFlags:
    """The flags of a direction."""

    steer: Path | None = None
    """A direction that fenchel steer has written for this model, added to its stream."""
    strength: Annotated[float | None, Parameter(allow_leading_hyphen=True)] = None
    """How often it is added, by default as often as the file says; below 0 the other way."""

    def direction(self, model: "Transformer") -> "Direction | None":
        """The direction of the file; None without --steer."""
        if self.steer is None:
            if self.strength is not None:
                raise ValueError("--strength belongs to --steer FILE.")
            return None
        from fenchel.steering import Direction

        found = Direction.load(self.steer, model)
        return found if self.strength is None else found.at(self.strength)

    def steered(self, model: "Transformer") -> "Transformer":
        """The model with the direction in its weights; the model itself without --steer."""
        direction = self.direction(model)
        return model if direction is None else direction.added_to(model)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SteerFlags(DirectionFlags):
    """The flags of steered decoding."""

    token_kl: float | None = None
    """KL to the law of the unsteered model that no token exceeds, in nats; as many rows again."""
    emphasise: Annotated[list[str] | None, Parameter(negative="")] = None
    """Words of the prompt that attention is drawn to; may be given several times."""
    emphasis: Annotated[float | None, Parameter(allow_leading_hyphen=True)] = None
    """Logarithm of the factor on their weights, 1 by default; below 0 they are read less."""
    emphasis_layers: str | None = None
    """The layers that emphasise, from 1, as in 3 or 1-4,12; all by default."""
    head_beta: Annotated[list[str] | None, Parameter(negative="")] = None
    """HEAD=FACTOR on the scores of a head: 2.1=0.5 of head 1 of layer 2, 2=0.5 of a layer, all=0.5
    of all; below 1 it chooses more evenly. May be given several times."""
    head_choice: Annotated[list[str] | None, Parameter(negative="")] = None
    """HEAD=MAP by which a head chooses: softmax, entmax, sparsemax or hard, as in 2.1=sparsemax.
    May be given several times."""

    def steering(self, model: "Transformer") -> "Steering | None":
        """What every request of a command is steered by; None without these flags."""
        if self.emphasise is None and (self.emphasis, self.emphasis_layers) != (None, None):
            raise ValueError("--emphasis and --emphasis-layers belong to --emphasise WORDS.")
        direction = self.direction(model)
        if direction is None and not (self.emphasise or self.head_beta or self.head_choice):
            if self.token_kl is not None:
                raise ValueError(
                    "--token-kl belongs to --steer FILE, --emphasise WORDS, --head-beta or "
                    "--head-choice."
                )
            return None
        from fenchel.generation import Emphasis, Steering
        from fenchel.generation.steering import head_choices

        emphasis = None
        if self.emphasise is not None:
            layers = numbers(self.emphasis_layers, "--emphasis-layers")
            emphasis = Emphasis(
                texts=tuple(self.emphasise),
                bias=1.0 if self.emphasis is None else self.emphasis,
                layers=None if layers is None else frozenset(layers),
            )
        betas = {
            name: _number(value, f"--head-beta {name}={value}")
            for name, value in _pairs(self.head_beta, "--head-beta", "2.1=0.5")
        }
        maps = dict(_pairs(self.head_choice, "--head-choice", "2.1=sparsemax"))
        steering = Steering(
            {} if direction is None else direction.scaled,
            emphasis,
            self.token_kl,
            head_choices(model.config, betas, maps),
        )
        steering.require(model.config)
        return steering


NO_DIRECTION, NOT_STEERED = DirectionFlags(), SteerFlags()


def run(
    directory: ModelPath,
    /,
    *,
    out: Path,
    toward: Path | None = None,
    away: Path | None = None,
    word: Annotated[list[str] | None, Parameter(negative="")] = None,
    against: Annotated[list[str] | None, Parameter(negative="")] = None,
    singular: str | None = None,
    number: Whole = 1,
    layer: Whole | None = None,
    kl: float = 0.1,
    opposite: Switch = False,
    text: str = "sotu",
    max_tokens: Whole = 256,
    loading_as: LoadFlags = LOADED_AS_STORED,
    json: Json = False,
) -> int:
    """Make a direction that steers a model, with a strength that keeps a budget.

    The direction is the difference between the mean streams of texts that show what is wanted and
    of texts that show what is not (--toward, --away), it raises the logits of words (--word,
    --against), or it is what a text is most sensitive to between two layers (--singular), for
    study: such directions steer a text no better than random ones. Its strength is found so that
    the law of the next token moves by --kl nats on average over a text: 0.1 is visible and fluent,
    0.3 is strong. generate, chat, eval and serve take the file by --steer.

    Parameters
    ----------
    out
        File to write, of safetensors.
    toward
        A file with texts that show what is wanted, one per line; of JSON lines, with texts or
        conversations, where it ends in .jsonl.
    away
        A file with texts that show what is not wanted, likewise.
    word
        A word whose logit is raised, instead of --toward; may be given several times.
    against
        A word whose logit is lowered, with --word; may be given several times.
    singular
        Two layers, as in 1-3: a direction after the first that moves the stream after the second
        the most.
    number
        With --singular, which of these directions, from 1.
    layer
        The layer after which the direction is added, from 1; two thirds of the way by default.
    kl
        KL(steered || unsteered) in nats, mean over the tokens of the text; at most 1.
    opposite
        Find the strength against the direction.
    text
        The text on which the strength is found: a file, which may hold conversations, a folder, or
        a built-in text.
    max_tokens
        Tokens of the text that are read, and as many after them for a second look.
    """
    if sum(x is not None for x in (toward, word, singular)) != 1 or (toward is None) != (
        away is None
    ):
        raise ValueError("give --toward FILE and --away FILE, --word WORD, or --singular LAYERS.")
    if against is not None and word is None:
        raise ValueError("--against belongs to --word.")
    between = None if singular is None else _two_layers(singular, number)
    if singular is None and number != 1:
        raise ValueError("--number belongs to --singular.")
    if singular is not None and layer is not None:
        raise ValueError("--singular names its layers; leave out --layer.")
    if max_tokens < 2:
        raise ValueError(f"--max-tokens {max_tokens} should be 2 or more.")
    reads = [directory, loading_as.adapter, toward, away, text_path(text)]
    require_output(out, new=True, reads=reads)
    require_inputs(directory, text, conversations=True)
    with stages(json=json) as console:
        import torch

        from fenchel.checkpoints.tokenizer import encoded_documents
        from fenchel.data import holds_conversations
        from fenchel.steering import (
            MOST_NATS,
            difference_of_means,
            divergence,
            find_strength,
            singular_directions,
            word_direction,
        )

        if not 0.0 < kl <= MOST_NATS:
            raise ValueError(f"--kl {kl:g} should be above 0 and at most {MOST_NATS:g} nats.")
        model, tokenizer, config = loading_as.load(directory, float64=True)
        if config.kind != "decoder":
            raise ValueError(f"steering is for decoders, and {directory} is of kind {config.kind}.")
        at = max(1, round(2 * config.layers / 3)) if layer is None else layer
        count = min(max_tokens, config.context)
        first, second = _two_parts(encoded_documents(text, tokenizer, directory), text, count)
        values: list[float] | None = None
        console.progress("making the direction", 0, 0)
        if toward is not None and away is not None:
            sides = [_sequences(file, tokenizer, directory) for file in (toward, away)]
            direction = difference_of_means(model, *sides, layer=at)
        elif between is not None:
            at, draw = between[0], torch.Generator().manual_seed(0)
            tops = singular_directions(model, first, between, number, generator=draw)
            direction, values = tops.directions[number - 1], tops.values
        else:
            ids = [[tokenizer.word_start(w) for w in words or ()] for words in (word, against)]
            direction = word_direction(model, first, *ids, layer=at)
        console.progress("finding the strength", 0, 0)
        found = find_strength(model, direction, first, kl, negative=opposite)
        direction = direction.at(found.value)
        elsewhere = divergence(model, direction, second)
    direction.save(out)
    record: dict[str, Any] = {
        "direction": direction.about,
        "layer": at,
        "strength": found.value,
        "passes": found.passes,
        "text": text,
        "tokens": len(first),
        "kl": found.divergence._asdict(),
        "kl_after": elsewhere._asdict(),
        "out": str(out),
        **({} if values is None else {"singular_values": values}),
    }
    if json:
        print(json_format.dumps(record))
        return 0
    here = found.divergence
    shown = printable(out, 4096)
    then = "chat" if holds_conversations(text) else "generate"
    console = Console()
    for sentence in (
        f"{direction.about}; strength {found.value:.3g}, found in {found.passes} passes.",
        f"The law of the next token moves by {here.mean:.3g} nats on average over {len(first)} "
        f"tokens of {printable(text)}, by {here.worst:.2g} at most; over the {len(second)} after "
        f"them by {elsewhere.mean:.3g} and {elsewhere.worst:.2g}, where the loss changes by "
        f"{elsewhere.loss:+.3f} nats per token.",
        f"Saved to {shown}. Try fenchel {then} {printable(directory, 4096)} --steer {shown}",
    ):
        console.message(sentence)
    return 0


def _two_layers(words: str, number: int) -> tuple[int, int]:
    """ "1-3" as two layers, for a direction with a number from 1."""
    found = numbers(words, "--singular") or []
    if len(found) < 2 or "," in words:
        raise ValueError(f"--singular {printable(words, 60)} should be two layers, as in 1-3.")
    if number < 1:
        raise ValueError(f"--number {number} should be 1 or more.")
    return found[0], found[-1]


def _pairs(flags: list[str] | None, name: str, example: str) -> list[tuple[str, str]]:
    """What stands before and behind the = of every flag."""
    pairs = [flag.partition("=") for flag in flags or ()]
    for (head, equals, value), flag in zip(pairs, flags or (), strict=True):
        if not (head and equals and value):
            raise ValueError(f"{name} {printable(flag, 60)} should be as in {example}.")
    return [(head, value) for head, _, value in pairs]


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{printable(flag, 60)} should give a number.") from None


def _sequences(file: Path, tokenizer: "TextTokenizer", directory: Path) -> list[list[int]]:
    """The ids of every line of a file that is not empty, or of its texts or conversations."""
    from fenchel.checkpoints.tokenizer import encoded_documents
    from fenchel.data import holds_conversations, open_text

    try:
        lines = read_regular(file, _BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text.") from None
    if not (lines := [line.strip() for line in lines if line.strip()]):
        raise ValueError(f"{file} has no text; write one text per line.")
    if file.suffix != ".jsonl":
        return [tokenizer.encode_whole(line) for line in lines]
    if holds_conversations(str(file)):
        return list(encoded_documents(str(file), tokenizer, directory))
    return [tokenizer.encode_whole(one.text) for one in open_text(str(file)).documents()]


def _two_parts(
    documents: Iterable[list[int]], text: str, count: int
) -> tuple[list[int], list[int]]:
    """The first tokens of a text, and as many after them, or its two halves."""
    ids: list[int] = []
    for document in documents:
        ids += document
        if len(ids) >= 2 * count:
            break
    count = min(count, len(ids) // 2)
    if count < 2:
        raise ValueError(f"{text} has {len(ids)} tokens; at least four are needed.")
    return ids[:count], ids[count : 2 * count]
