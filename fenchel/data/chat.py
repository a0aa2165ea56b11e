"""Conversations to token ids by the chat template of a model.

A chat template is a jinja2 program that writes a conversation as the text that the model was
trained on, with control tokens around the turns. It is a file from elsewhere: at most 64 KiB of it
are read, and it is rendered in a child process bounded in time and memory (``sandbox``).

**What a user writes stays text.** The content of a message may spell a control token, such as
<|im_end|>, and in the rendered text it could not be told from the template's own. So contents are
rendered with marks, single characters that occur nowhere else in the conversation: they survive
filters (trim, upper), cuts and tests on the content. Afterwards control tokens are recognised, and
only then are the marks replaced by what they stand for.

    loose     a mark for every spelling of a control token in a content
    strict    a mark for every first character of a control token in a content, "<" say

A template can still join two contents, or remove characters, so that a control token appears which
no content spells. In the strict text that is impossible. The loose text, in which the template sees
contents as they are but for control tokens, is used if both have the same control tokens, and else
the strict one. ``trust_user_tokens`` renders without marks, as transformers does.

**Answers.** For tuning, ``encode_answers`` says which tokens the model is to write: with m_i an
answer,

    before_i = the text of m_0 ... m_{i-1} with the prompt for an answer
    with_i   = the text of m_0 ... m_i
    answer_i = what with_i has more than before_i, up to its last control token, which ends the turn

where the text of the whole conversation begins with with_i, and with_i with before_i. Some
templates write earlier answers otherwise than the last, without their reasoning for example. There
the content of the message counts, found by marks around it, or what is left of its end, and the
control token after it. A template with {% generation %} says itself what the model writes. Of a
template without any control token after answers a model would learn no end: there the last answer,
with the text after it, is followed by the token that ends a document.

The text of a template begins as the template says: the tokenizer adds no beginning to it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from fenchel.data.sandbox import RENDER_CHARACTERS, RenderingProcess
from fenchel.data.tokens import TextTokenizer
from fenchel.files import printable

ROLES = ("system", "user", "assistant")
LARGEST_TEMPLATE = 2**16
"""Bytes of a template."""
MOST_MESSAGES = 4096
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Lines of role and content, for a model without a template."""
PLAIN_WITH_END = PLAIN.replace(
    "| trim }}", "| trim }}{{ eos_token if message.role == 'assistant' else '' }}"
)
"""``PLAIN`` with the end token after every answer, which a model that is tuned learns to write."""

Message = Mapping[str, str]
"""A role and a content."""

_JINJA = (3, 1, 6)  # escapes from the sandbox of older versions are known
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CUTS = 32  # places at which the beginning of a shortened answer is looked for
_LONGEST_FRAME = 2**18  # characters that a template may write around a conversation in tuning
_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that Unicode gives no meaning


class ChatTemplate:
    """The chat template of a model.

    >>> template = ChatTemplate(PLAIN, {"bos_token": "<s>"})
    >>> template.render([{"role": "user", "content": "Hello."}], add_generation_prompt=True)
    '<s>user: Hello.\\nassistant:'
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], name: str = "the chat template"
    ) -> None:
        """``special_tokens`` are what the template may name: bos_token, eos_token and others."""
        if (size := len(source.encode(errors="replace"))) > LARGEST_TEMPLATE:
            raise ValueError(
                f"{name} has {size:,} bytes; more than {LARGEST_TEMPLATE:,} is not read."
            )
        _require_jinja()
        self.source, self.name, self.special_tokens = source, name, dict(special_tokens)
        self._process = RenderingProcess(source, special_tokens, name)
        self._marks_answers = _MARKS_ANSWERS.search(source) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, with the beginning of an answer if one is to follow."""
        messages = check_messages(messages)
        marks = _Marks(self.source, messages)
        return marks.answers(self._render(messages, add_generation_prompt, marks))[0]

    def encode(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        trust_user_tokens: bool = False,
        context: int | None = None,
    ) -> list[int]:
        """The ids of a conversation.

        A control token in a content becomes plain text, unless ``trust_user_tokens``. A text that
        cannot fit into a ``context`` of so many tokens is refused before it is encoded.
        """
        messages, control = check_messages(messages), _Control(tokenizer)
        marks = _Marks(self.source, messages)
        if not trust_user_tokens:
            messages = self._protect(messages, add_generation_prompt, control, marks)
        text, _ = marks.answers(self._render(messages, add_generation_prompt, marks))
        if context is not None and len(text) > (most := tokenizer.most_characters(context)):
            raise ValueError(
                f"{self.name} writes {len(text):,} characters; for {context:,} tokens of context "
                f"{most:,} are read at most."
            )
        pieces = [piece for piece, _ in _pieces(text, control, marks, [])]
        if not (ids := tokenizer.encode_pieces(pieces).ids):
            raise ValueError(f"{self.name} writes nothing for this conversation.")
        return ids

    def encode_answers(
        self, tokenizer: TextTokenizer, messages: Sequence[Message], end: int | None = None
    ) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and True at those that the assistant is to write.

        These are its answers and the token that ends each of them. A control token in a content
        becomes plain text. Where the template writes no control token after the last answer, the
        control token ``end`` follows it.
        """
        messages, control = check_messages(messages), _Control(tokenizer)
        marks = _Marks(self.source, messages)
        messages = self._protect(messages, False, control, marks)
        text, spans = self._answers(messages, control, marks)
        written = sum(len(message["content"]) for message in messages)
        if len(text) > _LONGEST_FRAME + 8 * written:
            raise ValueError(
                f"{self.name} writes {len(text):,} characters for a conversation of {written:,}."
            )
        added: list[tuple[str | int, bool]] = []
        if (
            end is not None
            and end in control.ids.values()
            and not self._marks_answers
            and messages[-1]["role"] == "assistant"
            and control.pattern.search(text, spans[-1].start) is None
        ):
            spans[-1] = spans[-1]._replace(end=len(text))
            added = [(end, True)]
        pieces = [*_pieces(text, control, marks, spans), *added]
        tokens = tokenizer.encode_pieces([piece for piece, _ in pieces])
        return tokens.ids, [any(pieces[n][1] for n in covered) for covered in tokens.pieces]

    def stops(self, tokenizer: TextTokenizer) -> list[int | str]:
        """What ends an answer: the control token after it, or else the text before the next turn.

        Empty if the template gives neither, or raises an error with and without a system message.
        """
        if (example := self._example(("user", "assistant", "user"))) is None:
            return []
        control, (text, (_, answer, question)) = _Control(tokenizer), example
        between = text.partition(answer)[2].partition(question)[0]
        if (token := control.pattern.search(between)) is not None:
            return [control.ids[token[0]]]
        return [between.rstrip()] if between.strip() else []

    def require_answers(self) -> None:
        """Refuse a template that leaves out what the assistant says: there is nothing to learn."""
        found = [self._example(("user", "assistant", *more)) for more in ((), ("user",))]
        if all(one is not None and one[1][1] not in one[0] for one in found):
            raise ValueError(
                f"{self.name} does not write what the assistant says, so that there is nothing to "
                "learn from it; give another by --template."
            )

    def _example(self, roles: Sequence[str]) -> tuple[str, list[str]] | None:
        """The text of a conversation whose contents are marks, and these.

        None where the template raises an error with and without a system message before it.
        """
        marks = _Marks(self.source, [])
        turns = [{"role": role, "content": marks.stand_for(role)} for role in ("system", *roles)]
        for messages in (turns[1:], turns):
            try:
                text, _ = marks.answers(self._render(messages, False, marks))
            except ValueError:  # some templates require a system message
                continue
            return text, [turn["content"] for turn in turns[1:]]
        return None

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, marks: "_Marks"
    ) -> str:
        return self._process.render([(messages, add_generation_prompt)], marks.around)[0]

    def _protect(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        control: "_Control",
        marks: "_Marks",
    ) -> Sequence[Message]:
        """The messages with marks where a content could become a control token."""
        if not any(control.first.search(message["content"]) for message in messages):
            return messages
        loose, strict = (
            [
                {**message, "content": pattern.sub(marks.stand_for_match, message["content"])}
                for message in messages
            ]
            for pattern in (control.pattern, control.first)
        )
        texts = self._process.render(
            [(loose, add_generation_prompt), (strict, add_generation_prompt)], marks.around
        )
        tokens = [control.pattern.findall(text) for text in texts]
        return loose if tokens[0] == tokens[1] else strict

    def _answers(
        self, messages: Sequence[Message], control: "_Control", marks: "_Marks"
    ) -> "tuple[str, list[_Span]]":
        """The text of a conversation, and where the assistant's answers are in it."""
        text, spans = marks.answers(self._render(messages, False, marks))
        if self._marks_answers:
            return text, [control.with_end(text, span) for span in spans]
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        found = self._by_prefix(text, messages, numbers, control, marks)
        unknown = [n for n, span in zip(numbers, found, strict=True) if span is None]
        inside = iter(self._by_marks(text, messages, unknown, marks) if unknown else ())
        return text, [span or control.with_end(text, next(inside)) for span in found]

    def _by_prefix(
        self,
        text: str,
        messages: Sequence[Message],
        numbers: list[int],
        control: "_Control",
        marks: "_Marks",
    ) -> "list[_Span | None]":
        """answer_i for each answer; None where the text does not begin with with_i."""
        parts = [
            part for n in numbers for part in ((messages[:n], True), (messages[: n + 1], False))
        ]
        try:
            texts = self._process.render(parts, marks.around)
        except ValueError:  # the template refuses a beginning of the conversation
            return [None for _ in numbers]
        spans: list[_Span | None] = []
        for before, with_answer in zip(texts[::2], texts[1::2], strict=True):
            if not (text.startswith(with_answer) and with_answer.startswith(before)):
                spans.append(None)
                continue
            span = _Span(len(before), len(with_answer))
            tokens = list(control.pattern.finditer(text, *span))
            spans.append(
                span._replace(end=tokens[-1].end()) if tokens else control.with_end(text, span)
            )
        return spans

    def _by_marks(
        self, text: str, messages: Sequence[Message], numbers: list[int], marks: "_Marks"
    ) -> "list[_Span]":
        """Where the content of each of these answers is."""
        cuts = dict.fromkeys(numbers, 0)
        spans = self._spans(text, messages, cuts, marks)
        for at, n in enumerate(numbers):
            if spans is None or spans[at].start >= 0:
                continue
            # The beginning of the content is left out, and the mark with it: its place is before
            # the first character that is left, or later where the template tests what is there.
            content, written = messages[n]["content"].strip(), text[: spans[at].end]
            ends = zip(reversed(content), reversed(written), strict=False)
            left = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
            for cut in range(len(content) - left, len(content) + 1)[:_CUTS]:
                tried = self._spans(text, messages, {**cuts, n: cut}, marks)
                if tried is not None and tried[at].start >= 0:
                    spans, cuts[n] = tried, cut
                    break
        if spans is None or any(span.start < 0 for span in spans):
            raise ValueError(
                f"{self.name} changes the assistant's answers, so that its tokens cannot be told "
                "from others; put {% generation %} and {% endgeneration %} around them in the "
                "template."
            )
        return spans

    def _spans(
        self, text: str, messages: Sequence[Message], cuts: Mapping[int, int], marks: "_Marks"
    ) -> "list[_Span] | None":
        """Where the contents from ``cuts`` on are; None if marks change the text."""
        marked = [
            {**message, "content": marks.surround(message["content"], cuts[n])}
            if n in cuts
            else message
            for n, message in enumerate(messages)
        ]
        same, spans = marks.answers(self._render(marked, False, marks))
        return spans if same == text and len(spans) == len(cuts) else None


def _content_text(content: Any) -> str:
    """A content that is a text, or parts of type text, which become its lines.

    >>> _content_text([{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who?"}])
    'Hello.\\nWho?'
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) and content else (content,):
        text = part.get("text") if isinstance(part, dict) and len(part) == 2 else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise ValueError(
                f"the content of a message is a text, or parts of type text, got {printable(part)}."
            )
        texts.append(text)
    return "\n".join(texts)


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as plain objects; refused unless each has a known role and a text.

    >>> check_messages([{"role": "user", "content": "Hello."}])
    [{'role': 'user', 'content': 'Hello.'}]
    """
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise ValueError(
            f"a conversation has 1 to {MOST_MESSAGES:,} messages, this one {len(messages):,}."
        )
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(
                f"a message is an object with role and content, got {printable(message)}."
            )
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"the role {printable(role)!r} is none of {', '.join(ROLES)}.")
        checked.append({"role": role, "content": _content_text(content)})
    if (size := sum(len(message["content"]) for message in checked)) > RENDER_CHARACTERS:
        raise ValueError(
            f"the conversation has {size:,} characters; more than {RENDER_CHARACTERS:,} are not "
            "rendered."
        )
    return checked


class _Span(NamedTuple):
    """Characters of a text."""

    start: int
    end: int


class _Control:
    """The control tokens of a tokenizer, as they are spelled."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.ids = tokenizer.control_tokens
        # Of several at one place the longest, as the library finds them.
        longest_first = sorted(self.ids, key=len, reverse=True)
        spelled = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.pattern = re.compile(spelled)
        self.first = re.compile("|".join({re.escape(one[0]) for one in longest_first}) or "(?!)")
        self._end = re.compile(rf"\s*(?:{spelled})")

    def with_end(self, text: str, span: _Span) -> _Span:
        """The span with the control token after it, unless it ends with one."""
        tokens = list(self.pattern.finditer(text, *span))
        if tokens and not text[tokens[-1].end() : span.end].strip():
            return span
        end = self._end.match(text, span.end)
        return span if end is None else span._replace(end=end.end())


class _Marks:
    """Characters that no content has, and what they stand for."""

    def __init__(self, template: str, messages: Sequence[Message]) -> None:
        used = set(template).union(*(message["content"] for message in messages))
        self._free = (mark for mark in map(chr, _PRIVATE) if mark not in used)
        self.around = next(self._free) + next(self._free)
        """Before and after an answer."""
        self._texts: dict[int, str] = {}
        self._marks: dict[str, str] = {}

    def stand_for(self, text: str) -> str:
        """A new mark for a text."""
        mark = next(self._free)
        self._texts[ord(mark)] = text
        return mark

    def stand_for_match(self, match: re.Match[str]) -> str:
        """The mark for a spelling."""
        if match[0] not in self._marks:
            self._marks[match[0]] = self.stand_for(match[0])
        return self._marks[match[0]]

    def surround(self, content: str, cut: int = 0) -> str:
        """Marks around a content, within the white space around it, which a template may remove.

        The first ``cut`` characters stay before the marks.
        """
        core = content.strip()
        lead, _, trail = content.partition(core) if core else (content, "", "")
        return f"{lead}{core[:cut]}{self.around[0]}{core[cut:]}{self.around[1]}{trail}"

    def replace(self, text: str) -> str:
        """The text with what its marks stand for."""
        return text.translate(self._texts)

    def answers(self, text: str) -> tuple[str, list[_Span]]:
        """The text without the marks around answers, and where these are in it.

        The start of one whose first mark is lost is -1.
        """
        parts, spans, length, start = [], [], 0, -1
        for part in re.split(f"([{self.around}])", text):
            if part == self.around[0]:
                start = length
            elif part == self.around[1]:
                spans.append(_Span(start, length))
                start = -1
            else:
                parts.append(part)
                length += len(part)
        return "".join(parts), spans


def _pieces(
    text: str, control: _Control, marks: _Marks, spans: Sequence[_Span]
) -> Iterator[tuple[str | int, bool]]:
    """Control tokens by their ids and the text between them, and whether each is in a span."""
    tokens = {match.start(): match.end() for match in control.pattern.finditer(text)}
    edges = {edge for span in spans for edge in span}
    for start, end in pairwise(sorted({0, *tokens, *tokens.values(), *edges, len(text)})):
        part = text[start:end]
        is_token = tokens.get(start) == end
        yield (
            control.ids[part] if is_token else marks.replace(part),
            any(span.start <= start < span.end for span in spans),
        )


def _require_jinja() -> None:
    try:
        found = version("jinja2")
    except PackageNotFoundError:
        raise ValueError("chat templates need jinja2: pip install 'fenchel[serve]'.") from None
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < _JINJA:
        raise ValueError(
            f"jinja2 {found} does not isolate chat templates; "
            "pip install --upgrade 'fenchel[serve]'."
        )
