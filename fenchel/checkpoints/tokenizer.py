"""The tokenizer of a checkpoint directory, and how a text begins for its model.

A model is trained on texts that begin in one way, and without that beginning even a good one writes
nonsense. ``read_tokenizer`` decides the beginning once, for every command, as transformers does,
and stores it in the template of the tokenizer (``begin_ids``), where ``save`` and transformers find
it too:

    a run of ours             the end token, as in training, or as the checkpoint begins a text that
                              the run tunes
    a Hugging Face directory  what the template of tokenizer.json puts before a text, which may be
                              nothing; without one, what ``_TEMPLATES`` has for the class of the
                              tokenizer, else no token

bos_token_id and "add_bos_token" do not count: transformers leaves them out where there is a
tokenizer.json, and a model that was trained with a first token has it in the template.

A template of tokenizer.json encloses any text; the chat template writes a conversation, and is
chat_template.jinja, else the field chat_template of chat_template.json or of tokenizer_config.json.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fenchel.checkpoints.directory import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    bounded_json_file,
    has_file,
    read_bounded_json,
    regular_file,
)
from fenchel.checkpoints.generation_config import (
    GENERATION,
    GenerationConfig,
    read_generation_config,
)
from fenchel.checkpoints.run_checkpoint import check_tokenizer, is_run, model_files
from fenchel.data import (
    END,
    PLAIN,
    ChatTemplate,
    TextTokenizer,
    holds_conversations,
    load_tokenizer,
    open_text,
)
from fenchel.data.chat import LARGEST_TEMPLATE, Message
from fenchel.files import printable, read_regular
from fenchel.model.families.config_reader import CONFIG


def read_tokenizer(
    path: Path, vocabulary: int | None = None, config: Mapping[str, Any] | None = None
) -> TextTokenizer:
    """tokenizer.json of a directory; refused if it has more ids than ``vocabulary``.

    ``config`` is its config.json, which is read unless it is given.
    """
    path = model_files(path)
    if not has_file(path, TOKENIZER):
        raise ValueError(
            f"{path} holds no {TOKENIZER}; save the model's fast tokenizer there "
            "(fenchel.checkpoints.load_model reads only the weights)."
        )
    run = is_run(path)
    if run:
        check_tokenizer(path)
    tokenizer = load_tokenizer(bounded_json_file(path, TOKENIZER), needs_end=run)
    if vocabulary is not None and (size := tokenizer.vocabulary_size) > vocabulary:
        raise ValueError(
            f"{path / TOKENIZER} has {size} ids and the vocabulary of the model {vocabulary}; "
            "it is not the tokenizer of this model."
        )
    if run:
        return tokenizer if tokenizer.begin_ids else tokenizer.begin_with(tokenizer.end_id)
    return _with_template_of_class(path, tokenizer, config)


def end_ids(path: str | Path, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids at which a text of the directory ends: its eos_token_id, else the end token.

    The first is that of documents. A model for chats has more: <|end_of_text|> ends a document,
    <|eot_id|> a turn. An id that no token has does not count: configs of small vocabularies have
    ids of others.
    """
    path = model_files(Path(path))
    usual = tokenizer.end_id if tokenizer.has_end else None
    if not is_run(path) and has_file(path, CONFIG):
        eos = read_generation_config(path).eos
        if known := [id for id in eos if tokenizer.id_to_token(id) is not None]:
            return tuple(sorted(known, key=lambda id: id != usual))  # in their order otherwise
    return () if usual is None else (usual,)


def suggested_generation(path: Path) -> tuple[GenerationConfig, Path]:
    """The generation settings of a directory, or of what a run tunes, and the file they are from.

    A run that began with random weights suggests none.
    """
    path = model_files(path)
    source = path / (GENERATION if has_file(path, GENERATION) else CONFIG)
    if is_run(path) or not has_file(path, CONFIG):
        return GenerationConfig(), source
    return read_generation_config(path), source


def document_end(path: str | Path, tokenizer: TextTokenizer) -> int | None:
    """The id of the token after a document; None if there is none."""
    return next(iter(end_ids(path, tokenizer)), None)


def read_chat_template(path: Path, source: str | None = None) -> ChatTemplate | None:
    """The chat template of a directory; None if it has none.

    ``source`` replaces it: "plain" for ``fenchel.data.PLAIN``, or the name of a file.
    """
    name = f"the chat template of {path}"
    run, path = is_run(path), model_files(path)
    settings = read_bounded_json(path, TOKENIZER_CONFIG) if has_file(path, TOKENIZER_CONFIG) else {}
    spelled = _special_tokens(path, settings)
    if run and not has_file(path, CONFIG):  # or the run tunes a Hugging Face directory
        spelled = {"bos_token": END, "eos_token": END} | spelled
    if source == "plain":
        return ChatTemplate(PLAIN, spelled, "the plain template")
    if source is not None:
        return ChatTemplate(_read_text(Path(source)), spelled, f"the template {source}")
    if has_file(path, CHAT_TEMPLATE):
        return ChatTemplate(_read_text(regular_file(path, CHAT_TEMPLATE)), spelled, name)
    if has_file(path, _OLD_CHAT_TEMPLATE):
        settings = read_bounded_json(path, _OLD_CHAT_TEMPLATE)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, of which one is named default
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return ChatTemplate(template, spelled, name) if isinstance(template, str) else None


def encoded_documents(
    source: str, tokenizer: TextTokenizer, folder: Path | None
) -> Iterator[list[int]]:
    """The ids of the documents of a text, or of its conversations by the template of a directory.

    Only the first text has the control tokens that the tokenizer puts around a text; a conversation
    has those of the template, and goes on to the beginning of an answer where it ends with a
    question.
    """
    if not holds_conversations(source):
        encode = tokenizer.encode_whole
        for document in open_text(source).documents():
            yield encode(document.text)
            encode = tokenizer.encode
        return
    conversation = conversation_encoder(tokenizer, folder)
    for document in open_text(source, messages=True, answered=False).documents():
        try:
            yield conversation(json.loads(document.text))
        except ValueError as error:
            raise ValueError(f"{printable(document.name)}: {error}") from None


def conversation_encoder(
    tokenizer: TextTokenizer, folder: Path | None
) -> Callable[[Sequence[Message]], list[int]]:
    """The function from a conversation to its ids, by the template of a directory.

    They go on to the beginning of an answer where the conversation ends with a question.
    """
    template = None if folder is None else read_chat_template(folder)
    if template is None:
        raise ValueError(
            "the model has no chat template to write a conversation by; a chat_template.jinja in "
            "its folder is one."
        )

    def encode(messages: Sequence[Message]) -> list[int]:
        asks = messages[-1]["role"] == "user"
        return template.encode(tokenizer, messages, add_generation_prompt=asks)

    return encode


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """What a template may name, with ``settings`` that are tokenizer_config.json.

    Beside a tokenizer_config.json without a table of added tokens, as it was once written,
    special_tokens_map.json takes precedence; so it is in transformers. A directory such as that of
    GPT-2 names no token in either: its tokens are bos_token_id and eos_token_id.
    """
    named = {name: settings.get(name) for name in _TEMPLATE_TOKENS}
    if "added_tokens_decoder" not in settings and has_file(path, _SPECIAL_TOKENS):
        older = read_bounded_json(path, _SPECIAL_TOKENS)
        named |= {name: older[name] for name in _TEMPLATE_TOKENS if name in older}
    spelled = {name: text for name, token in named.items() if (text := _spelling(token))}
    if not spelled and has_file(path, CONFIG) and has_file(path, TOKENIZER):
        tokenizer, ids = read_tokenizer(path), read_generation_config(path)
        found = {"bos_token": ids.bos, "eos_token": next(iter(ids.eos), None)}
        names = {name: tokenizer.id_to_token(id) for name, id in found.items() if id is not None}
        spelled = {name: text for name, text in names.items() if text is not None}
    return spelled


def describe_beginning(tokenizer: TextTokenizer) -> str:
    """How a text begins, in one line.

    >>> from fenchel.data import train_tokenizer
    >>> describe_beginning(train_tokenizer(["aa"], 300).begin_with(0))
    "A text begins with <|end|>, the model's begin token."
    """
    names = [printable(tokenizer.id_to_token(token)) for token in tokenizer.begin_ids]
    if not names:
        return "A text begins with no control token."
    return f"A text begins with {' '.join(names)}, the model's begin token{'s' * (len(names) > 1)}."


def _with_template_of_class(
    path: Path, tokenizer: TextTokenizer, config: Mapping[str, Any] | None
) -> TextTokenizer:
    """The tokenizer with the template that its class has in transformers."""
    if config is None:
        config = read_bounded_json(path, CONFIG) if has_file(path, CONFIG) else {}
    settings = read_bounded_json(path, TOKENIZER_CONFIG) if has_file(path, TOKENIZER_CONFIG) else {}
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    kind = str(kind or _CLASSES.get(str(config.get("model_type")))).removesuffix("Fast")
    if kind == _WITHOUT_TEMPLATE and tokenizer.encode_whole(""):
        return tokenizer.enclose_with([], [])
    if kind not in _TEMPLATES or tokenizer.library.post_processor is not None:
        return tokenizer
    ids = [
        [tokenizer.token_to_id(_spelling(settings.get(name)) or usual) for name, usual in side]
        for side in _TEMPLATES[kind]
    ]
    before, after = ([id for id in side if id is not None] for side in ids)
    return tokenizer.enclose_with(before, after)


def _spelling(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_text(file: Path) -> str:
    try:
        return read_regular(file, LARGEST_TEMPLATE).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 and cannot be a chat template.") from None


_CLASSES = {
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "mpnet": "MPNetTokenizer",
    "albert": "AlbertTokenizer",
    "t5": "T5Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
}
"""Classes of tokenizers of transformers where no file of a directory names one."""
_ENCODER = [("cls_token", "[CLS]")], [("sep_token", "[SEP]")]
_ROBERTA = [("cls_token", "<s>")], [("sep_token", "</s>")]
_TEMPLATES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "AlbertTokenizer"), _ENCODER),
    **dict.fromkeys(("RobertaTokenizer", "MPNetTokenizer"), _ROBERTA),
    "XLMRobertaTokenizer": ([("bos_token", "<s>")], [("eos_token", "</s>")]),
    "T5Tokenizer": ([], [("eos_token", "</s>")]),
    "CodeLlamaTokenizer": ([("bos_token", "<s>")], []),
}
"""Of classes with a template of their own, the tokens before and after a text: name, default."""
_WITHOUT_TEMPLATE = "GPTNeoXTokenizer"  # which discards that of tokenizer.json
_SPECIAL_TOKENS = "special_tokens_map.json"
JSON_FILES = (TOKENIZER_CONFIG, GENERATION, _SPECIAL_TOKENS, "added_tokens.json")
CHAT_TEMPLATE, _OLD_CHAT_TEMPLATE = "chat_template.jinja", "chat_template.json"
TEXT_FILES = (CHAT_TEMPLATE, _OLD_CHAT_TEMPLATE)
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
COPIED = (
    *JSON_FILES,
    *TEXT_FILES,
    *(TOKENIZER, "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files beside the weights that belong to a model: those of its tokenizer and of generation."""
_MAX_BYTES = 64 * 2**20


def read_files(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the files that the directory has, byte for byte."""
    files = {}
    for name in names:
        if not has_file(path, name):
            continue
        parsed = name in (TOKENIZER, *JSON_FILES)
        file = bounded_json_file(path, name) if parsed else regular_file(path, name)
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"{file} has {size} bytes; more than {_MAX_BYTES} is not copied.")
        files[name] = file.read_bytes()
    return files
