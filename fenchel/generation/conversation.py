"""A conversation with a model: messages and answers.

A turn is a message of the user and the answer to it:

    ids     = the conversation by the chat template of the model          data/chat.py
    tokens  = drawn one after another, up to a stop of the template       generation/generate.py
    content = their text, without the white space around it

The decoder keeps keys and values from turn to turn, so that only what is new is read. Answer i to
the same messages draws by ``choice_seed(seed, 0, i)``, as choice i of a served call does.

**Context.** An answer needs room for min(max_new_tokens, context / 4) tokens. Where the
conversation leaves less, its oldest turns are no longer given to the model, until it takes at most
half of the context: so this happens every few turns and not at each of them. The system message
stays. Nothing is removed from the conversation itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from fenchel.data import ChatTemplate, TextTokenizer
from fenchel.data.chat import Message
from fenchel.generation.decoder import Decoder
from fenchel.generation.generate import GenerationSettings, updates
from fenchel.generation.sampling import choice_seed
from fenchel.generation.scheduler import Token
from fenchel.generation.steering import Steering
from fenchel.model import Transformer

End = Literal["stop", "length", "context", "interrupt"]


class Answer(NamedTuple):
    """An answer, and the ids that it was computed from."""

    content: str
    ids: list[int]
    """Those of the conversation, then those of the answer without its stop."""
    start: int
    """Where the answer begins in ``ids``."""
    end: End
    """A stop, max_new_tokens, the context, or Ctrl-C."""
    tokens: tuple[Token, ...]
    """All that were drawn, with their log-probabilities and traces where the settings have them."""


class Conversation:
    """Messages and the model that answers them.

    ``interrupted`` tells whether a KeyboardInterrupt only stops the answer. ``on_left_out`` gets
    the tokens of a conversation that is too long, and the turns that the model no longer reads;
    ``on_missing`` the words to emphasise that it does not have, which are left out of this answer.
    ``decoder_start`` is the first token of the decoder of an encoder-decoder.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        settings: GenerationSettings,
        *,
        system: str | None = None,
        trust_user_tokens: bool = False,
        decoder_start: int | None = None,
        interrupted: Callable[[KeyboardInterrupt], bool] = lambda _: False,
        on_left_out: Callable[[int, int], None] = lambda *_: None,
        on_missing: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.settings, self.trust_user_tokens = settings, trust_user_tokens
        self.decoder_start = decoder_start
        self._interrupted, self._on_left_out = interrupted, on_left_out
        self._on_missing = on_missing
        self.system: str | None = None
        self.turns: list[tuple[str, str]] = []
        """Messages of the user, and their answers."""
        self.left_out = 0
        """Turns at the beginning that the model does not read again."""
        self.last: Answer | None = None
        """The answer of the last turn, if it has been computed and not removed."""
        self.used = 0
        """Tokens of the conversation at the last answer."""
        self._attempt = 0
        self._decoder: Decoder | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; refused where the template has no place for one."""
        self._encode(text, [], "Hello.")
        self.system = text

    def messages(self) -> list[Message]:
        """The whole conversation."""
        return _messages(self.system, self.turns)

    def ask(self, message: str, show: Callable[[str], None]) -> Answer:
        """The answer to a message, whose text ``show`` receives as it is drawn."""
        self._attempt = 0
        answer = self._answer(message, self.turns, show)
        if answer.content or answer.end != "interrupt":
            self.turns.append((message, answer.content))
            self.last = answer
        return answer

    def retry(self, show: Callable[[str], None]) -> Answer:
        """Another answer to the last message, in place of its answer."""
        if not self.turns:
            raise ValueError("there is no answer to draw again.")
        message, _ = self.turns[-1]
        self._attempt += 1
        answer = self._answer(message, self.turns[:-1], show)
        if answer.content or answer.end != "interrupt":
            self.turns[-1] = message, answer.content
            self.last = answer
        return answer

    def undo(self) -> str:
        """Remove the last turn; returns its message."""
        if not self.turns:
            raise ValueError("there is no message to remove.")
        message, _ = self.turns.pop()
        self.last, self.left_out = None, 0
        return message

    def clear(self) -> None:
        """Remove all turns."""
        self.turns.clear()
        self.last, self.left_out, self.used = None, 0, 0

    def _answer(
        self, message: str, turns: list[tuple[str, str]], show: Callable[[str], None]
    ) -> Answer:
        ids, left_out = self._fit(message, turns)
        prompt, source = ids, None
        if self.decoder_start is not None:
            prompt, source = [self.decoder_start], ids
        room = self.model.config.context - len(prompt)
        settings = self.settings
        if not settings.past_context:
            settings = replace(settings, max_new_tokens=min(room, settings.max_new_tokens))
        settings = replace(settings, steering=self._steering(prompt))
        request = settings.request(prompt, source=source)
        seed = choice_seed(request.seed, 0, self._attempt)
        request = replace(request, seed=seed, continues=False)
        new: list[Token] = []
        written, content, size = "", "", 0
        end: End = "interrupt"
        try:
            for update in updates(
                self.model,
                [request],
                settings,
                tokenizer=self.tokenizer,
                decoder=self._decoder_for(settings),
            ):
                if update.finish == "error":
                    raise ValueError(update.error)
                new += update.tokens
                written += "".join(token.text for token in update.tokens) + update.flush
                if len(stripped := written.strip()) > len(content):
                    show(stripped[len(content) :])
                    content, size = stripped, len(new)
                if update.finish is not None:
                    full = not settings.past_context and len(new) >= room
                    end = "stop" if update.finish == "stop" else "context" if full else "length"
        except KeyboardInterrupt as error:
            self._decoder = None
            if not self._interrupted(error):
                raise
        except BaseException:
            self._decoder = None
            raise
        self.left_out, self.used = left_out, len(ids) + len(new)
        answer = [token.id for token in new[:size]]
        return Answer(content, [*ids, *answer], len(ids), end, tuple(new))

    def _steering(self, ids: Sequence[int]) -> Steering | None:
        """What steers an answer to these ids: with emphasis on those words that they have."""
        steering = self.settings.steering
        if steering is None or steering.emphasis is None:
            return steering
        emphasis, tokens = steering.emphasis, set(steering.emphasis.tokens)
        for words in emphasis.texts:
            try:
                found = replace(emphasis, texts=(words,)).found_in(self.tokenizer, ids)
            except ValueError:
                self._on_missing(words)
            else:
                tokens |= found.tokens
        emphasis = replace(emphasis, tokens=frozenset(tokens), texts=())
        return replace(steering, emphasis=emphasis if tokens else None)

    def _decoder_for(self, settings: GenerationSettings) -> Decoder:
        """The decoder of all turns, whose rows keep what was read."""
        if self._decoder is None:
            self._decoder = replace(settings, max_new_tokens=1 << 20).decoder(self.model)
        return self._decoder

    def _fit(self, message: str, turns: list[tuple[str, str]]) -> tuple[list[int], int]:
        """The ids that an answer is drawn from, and how many turns are left out of them."""
        context, left_out = self.model.config.context, min(self.left_out, len(turns))
        ids = self._encode(self.system, turns[left_out:], message)
        whole, before = len(ids), left_out
        if whole + min(self.settings.max_new_tokens, context // 4) > context:
            while len(ids) > context // 2 and left_out < len(turns):
                left_out += 1
                ids = self._encode(self.system, turns[left_out:], message)
        if len(ids) >= context:
            raise ValueError(
                f"the message has {len(ids):,} tokens with the system message and the template; "
                f"the model reads {context:,} and needs one for its answer."
            )
        if left_out > before:
            self._on_left_out(whole, left_out)
        return ids, left_out

    def _encode(
        self, system: str | None, turns: Sequence[tuple[str, str]], message: str
    ) -> list[int]:
        return self.template.encode(
            self.tokenizer,
            [*_messages(system, turns), {"role": "user", "content": message}],
            add_generation_prompt=True,
            trust_user_tokens=self.trust_user_tokens,
            context=self.model.config.context,
        )


def _messages(system: str | None, turns: Sequence[tuple[str, str]]) -> list[Message]:
    first = [] if system is None else [{"role": "system", "content": system}]
    rest = (
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    )
    return [*first, *rest]
