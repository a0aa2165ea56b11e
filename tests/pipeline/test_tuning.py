"""fenchel/pipeline/tuning.py and ``tune``: a checkpoint continued, its documents, its files."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from fenchel import pipeline
from fenchel.checkpoints import convert, convert_to_peft, load, load_model, run_checkpoint
from fenchel.checkpoints.load import load_adapted
from fenchel.checkpoints.tokenizer import read_chat_template
from fenchel.cli import main
from fenchel.cli.doctor import check_checkpoint, check_run
from fenchel.data import Corpus
from fenchel.evaluate import score_documents
from fenchel.evaluate.score import document_predictions
from fenchel.files import read_sealed_json
from fenchel.generation import generate
from fenchel.model import ModelConfig, Transformer
from fenchel.model.lora import merge
from fenchel.optim.score.pairs import attention_pairs
from fenchel.pipeline.config import settings
from fenchel.pipeline.tuning import document_batches, pack_documents, tune_settings
from fenchel.train import RunDir

from .conftest import TEMPLATE, Remembering, write_checkpoint, write_tokenizer

Checkpoint = Callable[[str], Path]
QUICK: dict[str, Any] = {"threads": 1, "precision": "float32", "log_every": 1}


def tune(
    path: Path, out: Path, text: Path, callback: Remembering | None = None, **sections: Any
) -> Remembering:
    """A run on a text, with further settings by section."""
    callback = callback or Remembering()
    mapping = {**sections, "text": {"source": str(text)}}
    mapping["train"] = {**QUICK, **sections.get("train", {})}
    pipeline.tune(path, mapping, out, callback)
    return callback


def bits(run: Path) -> bytes:
    """The weights of the newest checkpoint."""
    folder, wrong = run_checkpoint.newest(run / "checkpoints")
    assert folder is not None
    assert not wrong
    return (folder / "model.safetensors").read_bytes()


def corpus_and_config(run: Path) -> tuple[Corpus, pipeline.RunConfig]:
    return pipeline.open_corpus(run), settings(RunDir(run).read_settings())


@pytest.fixture(scope="module")
def chat_run(checkpoint: Checkpoint, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama tuned on the conversations until it answers in their manner."""
    out = tmp_path_factory.mktemp("runs") / "chat"
    optim = {"optimiser": "adamw", "learning_rate": 0.02}
    tune(checkpoint("llama"), out, chats, train={"steps": 80, "batch": 4}, optim=optim)
    return out


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ({}, "trust"),
        ({"qk_norm": True}, "trust"),
        ({"qk_norm": True, "qk_norm_width": "all"}, "adamw"),
        ({"temperature": "stepped", "temperature_floor": 4}, "adamw"),
        ({"shared_kv_layers": 1}, "adamw"),
    ],
)
def test_the_default_rule_is_one_that_can_move_the_model(model: dict[str, Any], rule: str) -> None:
    config = ModelConfig(vocabulary=16, **model)
    assert tune_settings({}, Path("checkpoint"), config).optim.optimiser == rule
    pairs = None
    with contextlib.suppress(ValueError):
        pairs = attention_pairs(Transformer(config))
    assert (pairs is None) == (rule == "adamw")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_documents_begin_and_end_as_the_checkpoint_reads_them(
    kind: str, checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    tune(checkpoint(kind), tmp_path / "run", documents, train={"steps": 1})
    corpus, _ = corpus_and_config(tmp_path / "run")
    fast = transformers.AutoTokenizer.from_pretrained(checkpoint(kind))
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    assert corpus.documents_of is not None
    train, validation = corpus.documents_of
    rows = [train.ids[a:b].tolist() for a, b in zip(train.starts, train.starts[1:], strict=False)]
    kept = [text for n, text in enumerate(texts, 1) if n % 10]
    assert rows == [[*fast(text).input_ids, fast.eos_token_id] for text in kept]
    assert len(validation.starts) - 1 == 4
    assert next(iter(corpus.documents(validation=True))).text == texts[9]


def test_of_conversations_the_answers_alone_are_targets(
    checkpoint: Checkpoint, chats: Path, chat_run: Path
) -> None:
    """Against the masks of transformers, through the batches that training reads."""
    corpus, config = corpus_and_config(chat_run)
    fast = transformers.AutoTokenizer.from_pretrained(checkpoint("llama"))
    expected = []
    for line in chats.read_text().splitlines():
        whole = fast.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        pairs = zip(whole["input_ids"], whole["assistant_masks"], strict=True)
        expected.append([token for token, answer in pairs if answer])
    found = []
    for batch in document_batches(config, corpus, validation=False).in_order():
        for targets, segments in zip(batch.targets, batch.segments, strict=True):  # type: ignore[arg-type]
            for number in segments.unique():
                inside = targets[(segments == number) & (targets >= 0)].tolist()
                found += [inside] if inside else []
    assert sorted(found) == sorted(row for n, row in enumerate(expected, 1) if n % 10)


def test_the_gradient_does_not_depend_on_what_users_write_next(
    checkpoint: Checkpoint, chats: Path, chat_run: Path
) -> None:
    """The first loss is that of transformers on labels of the answers alone, document by document:
    neither a question as a target nor a neighbour in the row would leave it as it is.
    """
    corpus, config = corpus_and_config(chat_run)
    ours = load(checkpoint("llama")).model.double()
    rows = document_batches(config, corpus, validation=True)
    found = score_documents(ours, rows, bytes=corpus.predicted_bytes(validation=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama")).double()
    fast = transformers.AutoTokenizer.from_pretrained(checkpoint("llama"))
    total, count, size = 0.0, 0, 0
    for line in chats.read_text().splitlines()[9:10]:
        messages = json.loads(line)["messages"]
        whole = fast.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt"
        )
        ids, mask = whole["input_ids"], torch.as_tensor(whole["assistant_masks"]).bool().view(1, -1)
        losses = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total += losses[mask[0, 1:]].sum().item()
        count += int(mask[0, 1:].sum())
        size += sum(len(m["content"]) for m in messages if m["role"] == "assistant")
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(total / size / 0.6931471805599453, rel=1e-6)


def test_packed_documents_have_the_losses_of_documents_alone(
    checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    tune(checkpoint("gpt2"), tmp_path / "run", documents, train={"steps": 1}, tune={"context": 64})
    corpus, config = corpus_and_config(tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("gpt2")).double()
    rows = document_batches(config, corpus, validation=True)
    assert max(int(row.segments.max()) for row in rows.rows) > 0  # type: ignore[union-attr]
    assert corpus.documents_of is not None
    ids, starts, _ = corpus.documents_of[True]
    total, count = 0.0, 0
    for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        for first in range(a, b - 1, 64):  # a longer document is divided, and begins with nothing
            part = torch.tensor(ids[first : min(b, first + 65)].astype("int64"))
            losses = cross_entropy(model(part[None]).logits[0, :-1], part[1:], reduction="none")
            total, count = total + losses.sum().item(), count + len(losses)
    ours = score_documents(load(checkpoint("gpt2")).model.double(), rows, bytes=1)
    assert (ours.tokens, ours.loss) == (count, pytest.approx(total / count, rel=1e-6))


def test_a_tuned_model_answers_in_the_manner_it_was_taught_in_transformers_too(
    chat_run: Path, tmp_path: Path
) -> None:
    convert(chat_run, tmp_path / "out")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    fast: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert fast.chat_template == TEMPLATE
    messages = [{"role": "user", "content": "Cid?"}]
    ids = fast.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"] if not isinstance(ids, torch.Tensor) else ids
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False)
    ours, tokenizer, _ = load(chat_run)
    template = read_chat_template(chat_run)
    assert template is not None
    prompt = template.encode(tokenizer, messages, add_generation_prompt=True)
    assert prompt == ids[0].tolist()
    drawn = generate(ours, ids, max_new_tokens=12, temperature=0.0, stop=[2])
    assert drawn[0].tolist() == theirs[0].tolist()
    answer = tokenizer.decode(drawn[0, len(prompt) :].tolist(), skip_special_tokens=False)
    assert answer.startswith("Yea, Cid.<|im_end|>")


def test_a_stopped_run_ends_with_the_same_bits(
    checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    """Stopped after a checkpoint, and before the first, from the checkpoint that it tunes."""
    train = {"steps": 4, "batch": 2, "save_every": 2, "evaluate_every": 4}
    model = {"dropout": 0.1}
    tune(checkpoint("llama"), tmp_path / "whole", documents, train=train, model=model)
    for stop in (1, 3):
        run = tmp_path / f"stopped_{stop}"
        with pytest.raises(RuntimeError, match="killed"):
            tune(
                checkpoint("llama"),
                run,
                documents,
                Remembering(stop),
                train=train,
                model=model,
            )
        pipeline.resume(run, Remembering(), changes={})
        assert bits(run) == bits(tmp_path / "whole"), stop
    started = load(checkpoint("llama")).model.state_dict()
    assert not all(
        torch.equal(w, started[name])
        for name, w in load(tmp_path / "whole").model.state_dict().items()
    )


def test_a_resume_refuses_another_checkpoint_and_another_template(
    chats: Path, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="killed"):
        tune(
            base,
            run,
            chats,
            Remembering(1),
            train={"steps": 4, "evaluate_every": 4, "save_every": 4},
        )
    shutil.rmtree(base)
    model = write_checkpoint(base, "llama")
    weights = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        weights.model.norm.weight[0] = 2.0
    weights.save_pretrained(model)
    with pytest.raises(ValueError, match="other weights than when the run began"):
        pipeline.resume(run, Remembering(), changes={})
    write_checkpoint(base, "llama")
    (run / "base" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match="chat_template"):
        pipeline.resume(run, Remembering(), changes={})


def test_an_error_of_the_chat_template_names_what_was_given(
    checkpoint: Checkpoint, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory or the file as it was given, and on a resume the run; not its folder base."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint("llama"), "model")
    refusing = (
        TEMPLATE + "{% if 'Dan' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    )
    Path("model/chat_template.jinja").write_text(refusing)
    Path("other.jinja").write_text(refusing)
    mapping: dict[str, Any] = {"text": {"source": str(chats)}, "train": {**QUICK, "steps": 1}}
    for template, name in (
        (None, "the chat template of model"),
        ("other.jinja", "the template other.jinja"),
    ):
        with pytest.raises(ValueError, match=f": {name} refuses this conversation: no"):
            pipeline.tune(Path("model"), mapping, Path("run"), Remembering(), template=template)
    accepted = [line for line in chats.read_text().splitlines() if "Dan?" not in line]
    text = Path("text.jsonl")
    text.write_text("\n".join(accepted * 2) + "\n")
    tune(Path("model"), Path("run"), text, train={"steps": 1})
    text.write_text(chats.read_text())
    with pytest.raises(ValueError, match=": the chat template of run refuses this conversation"):
        pipeline.resume(Path("run"), Remembering(), changes={}, accept_new_text=True)
    with pytest.raises(ValueError, match=": the chat template of run refuses this conversation"):
        tune(Path("run"), Path("second"), chats, train={"steps": 1})


def test_a_run_of_our_own_is_tuned_and_keeps_its_beginning(
    documents: Path, chats: Path, tmp_path: Path
) -> None:
    small = {"context": 48, "width": 16, "heads": 2, "layers": 1}
    mapping = {"text": {"source": str(documents), "vocabulary": 280}, "model": small}
    train = {**QUICK, "steps": 2, "batch": 2}
    pipeline.begin(settings({**mapping, "train": train}), tmp_path / "first", Remembering())
    tune(tmp_path / "first", tmp_path / "second", documents, train={"steps": 2})
    with pytest.raises(ValueError, match="no chat template"):
        tune(tmp_path / "second", tmp_path / "third", chats, train={"steps": 2})
    assert not (tmp_path / "third").exists()
    mapping = {"text": {"source": str(chats)}, "train": {**QUICK, "steps": 2}}
    out = tmp_path / "third"
    pipeline.tune(tmp_path / "second", mapping, out, Remembering(), template="plain")
    tokenizers = [load(tmp_path / name).tokenizer for name in ("first", "second", "third")]
    assert {tuple(one.encode_whole("a")) for one in tokenizers} == {
        tuple(tokenizers[0].encode_whole("a"))
    }
    assert tokenizers[0].begin_ids[0] == 0  # <|end|>
    template = read_chat_template(out)
    assert template is not None
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yea."}]
    shown = template.render(turns, add_generation_prompt=True)
    assert shown == "<|end|>user: Hi\nassistant: Yea.<|end|>\nassistant:"
    assert template.encode_answers(tokenizers[0], turns)[1][-2:] == [True, False]  # the end, "\n"
    convert(out, tmp_path / "exported")
    fast: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert fast.chat_template == template.source


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("", "is empty"),
        ('{"text": "a"}\n{"text": \n', "line 2 should be an object"),
        ('{"text": "a"}\n{"messages": []}\n', "line 2 should be an object with a string"),
        ('{"body": "some words"}\n', "it has body; jq"),
        ('{"messages": []}\n', "line 1: a conversation has 1 to"),
        ('{"messages": [{"role": "bot", "content": "x"}]}\n', "line 1: the role 'bot' is none of"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', "line 1 has no answer"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}\n{"text": "a"}\n',
            'line 2 should be an object with a list "messages"',
        ),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n{\n', "line 2 is not JSON"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "leaves nothing to train on"),
        (
            '{"messages": [{"role": "assistant", "content": "\\ud800"}]}\n',
            "line 1 contains a lone surrogate",
        ),
    ],
)
def test_a_wrong_text_is_refused_in_one_sentence_and_leaves_nothing(
    lines: str, sentence: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(lines)
    with pytest.raises(ValueError, match=sentence) as error:
        tune(checkpoint("llama"), tmp_path / "run", text, train={"steps": 1})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"model": {"width": 8}}, "model.width is the checkpoint's"),
        ({"tune": {"context": 97}}, "more than the 96 positions"),
        ({"tune": {"contxt": 8}}, "did you mean tune.context"),
        ({"train": {"loss": "entmax"}}, "cross-entropy"),
        ({"train": {"init": "random"}}, "it needs a new model"),
        ({"train": {"qk_clip": 5.0}, "tune": {"rank": 2}}, "which a run that trains adapters"),
    ],
)
def test_settings_that_tuning_has_not_are_refused(
    sections: dict[str, Any], sentence: str, checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        tune(checkpoint("llama"), tmp_path / "run", documents, **sections)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def lora_run(checkpoint: Checkpoint, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 whose adapters are trained until it answers in the manner of the conversations."""
    out = tmp_path_factory.mktemp("runs") / "lora"
    tune(
        checkpoint("gpt2"),
        out,
        chats,
        train={"steps": 60, "batch": 4, "save_every": 60, "evaluate_every": 30},
        optim={"learning_rate": 0.05},
        tune={"rank": 4, "targets": ["q", "v", "out", "up", "down"]},
    )
    return out


def flipped(file: Path) -> Iterator[int]:
    """Flip a bit here and there in a file, one at a time; it is whole again afterwards."""
    whole = file.read_bytes()
    for at in (0, len(whole) // 3, len(whole) // 2, len(whole) - 2):
        data = bytearray(whole)
        data[at] ^= 4
        file.write_bytes(data)
        yield at
    file.write_bytes(whole)


def test_a_flipped_bit_of_an_adapter_is_found_by_every_reader_and_by_doctor(
    checkpoint: Checkpoint, lora_run: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    convert_to_peft(lora_run, adapter)
    assert set(check_checkpoint(adapter)) == {"manifest.json", "weights"}
    assert set(check_checkpoint(adapter).values()) == {"intact"}
    for file in adapter.iterdir():
        for at in flipped(file):
            assert set(check_checkpoint(adapter).values()) != {"intact"}, (file.name, at)
            with pytest.raises(ValueError, match=r"changed|seal|JSON|manifest"):
                load_model(checkpoint("gpt2"), adapter=adapter)
    manifest = (adapter / "manifest.json").read_bytes()
    for word in (b'"seal"', b'"files"', b'"sha256"', b'"bytes"'):
        (adapter / "manifest.json").write_bytes(manifest.replace(word, b'"x' + word[2:]))
        with pytest.raises(ValueError, match="manifest"):
            load_model(checkpoint("gpt2"), adapter=adapter)


def test_doctor_checks_what_a_tuned_run_keeps_of_its_checkpoint(
    lora_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora_run, run)
    assert set(check_run(run).values()) == {"intact"}
    for file in (run / "base").iterdir():
        for at in flipped(file):
            assert check_run(run)["base"] != "intact", (file.name, at)
    shutil.rmtree(run / "base")
    assert check_run(run)["base"] != "intact"


def test_adapters_alone_are_trained_saved_and_read_again(
    checkpoint: Checkpoint, lora_run: Path, tmp_path: Path
) -> None:
    folder, _ = run_checkpoint.newest(lora_run / "checkpoints")
    assert folder is not None
    names = load_file(folder / "model.safetensors").keys()
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B"}
    lines = map(json.loads, (lora_run / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] - 0.3
    # Ours merged, ours beside the weights, and PEFT's on the model of transformers.
    convert_to_peft(lora_run, tmp_path / "adapter")
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("gpt2"))
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    ids = torch.randint(5, 261, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits
        for model in (
            load(lora_run).model,
            load_adapted(lora_run),
            load(checkpoint("gpt2"), adapter=tmp_path / "adapter").model,
        ):
            torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    convert(lora_run, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_adapters_are_merged_in_float32_and_then_cast(
    stored: torch.dtype, checkpoint: Checkpoint, chats: Path, tmp_path: Path
) -> None:
    base, run, adapter = tmp_path / "base", tmp_path / "run", tmp_path / "adapter"
    convert(checkpoint("llama"), base, dtype=stored)
    train = {"steps": 2, "batch": 2}
    tune(base, run, chats, train=train, optim={"learning_rate": 0.05}, tune={"rank": 2})
    convert_to_peft(run, adapter)
    exact = load_adapted(run).float()
    merge(exact)
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        convert(run, out := tmp_path / f"run {number}", dtype=dtype)
        convert(base, both := tmp_path / f"base {number}", dtype=dtype, adapter=adapter)
        models = [
            load_model(run, dtype=dtype),
            load_model(base, dtype=dtype, adapter=adapter),
            load_model(out),
            load_model(both),
        ]
        for name, weight in exact.state_dict().items():
            for model in models:
                found = model.state_dict()[name]
                assert found.dtype == dtype
                torch.testing.assert_close(found, weight.to(dtype), atol=1e-6, rtol=1e-2)
                if dtype == torch.float32:
                    torch.testing.assert_close(found, weight, atol=1e-6, rtol=1e-6)


def test_a_stopped_run_of_adapters_ends_with_the_same_bits(
    checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    train = {"steps": 4, "batch": 2, "save_every": 2, "evaluate_every": 4}
    lora = {"rank": 2}
    tune(checkpoint("llama"), tmp_path / "whole", documents, train=train, tune=lora)
    for stop in (1, 3):
        run = tmp_path / f"stopped_{stop}"
        with pytest.raises(RuntimeError, match="killed"):
            tune(checkpoint("llama"), run, documents, Remembering(stop), train=train, tune=lora)
        pipeline.resume(run, Remembering(), changes={})
        assert bits(run) == bits(tmp_path / "whole"), stop
    with pytest.raises(ValueError, match="by one rule for all"):
        tune(
            checkpoint("llama"),
            tmp_path / "muon",
            documents,
            tune=lora,
            optim={"optimiser": "muon"},
        )
    with pytest.raises(ValueError, match=r"tune\.rank cannot change"):
        pipeline.resume(tmp_path / "whole", Remembering(), changes={"tune": {"rank": 3}})
    with pytest.raises(ValueError, match="'qq'"):
        tune(checkpoint("llama"), tmp_path / "qq", documents, tune={**lora, "targets": ["qq"]})


@pytest.mark.parametrize(("adapters", "most"), [({}, 0.01), ({"rank": 2}, 0.002)])
def test_a_budget_of_kl_is_kept_and_a_stopped_run_ends_with_the_same_bits(
    checkpoint: Checkpoint, documents: Path, tmp_path: Path, adapters: dict[str, Any], most: float
) -> None:
    train = {"steps": 5, "batch": 2, "save_every": 2, "evaluate_every": 2}
    optim = {"optimiser": "adamw", "learning_rate": 0.02}
    kls = {}
    for name, budget in (("kept", {"kl": most}), ("free", {"kl": 1e6})):
        settings_ = {"train": train, "optim": optim, "tune": {**adapters, **budget}}
        callback = tune(checkpoint("llama"), tmp_path / name, documents, **settings_)
        corpus, config = corpus_and_config(tmp_path / name)
        rows = document_batches(config, corpus, validation=True)
        base = load(checkpoint("llama")).model
        tuned = load_model(tmp_path / name, which="newest")
        total, count = 0.0, 0  # by torch's own divergence
        for (p, _), (q, _) in zip(
            document_predictions(tuned, rows), document_predictions(base, rows), strict=True
        ):
            p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            total += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
            count += len(p)
        kls[name] = total / count
        reported = read_sealed_json(tmp_path / name / "summary.json")["tuning"]["kl"]["measured"]
        assert reported == pytest.approx(kls[name], rel=1e-4)
        assert any(f"is {reported:.4g} nats per token" in line for line in callback.messages)
    assert kls["free"] > 2.0 * most
    assert 0.5 * most < kls["kept"] <= most * (1 + 1e-5)
    page = (tmp_path / "kept" / "report.html").read_text()
    assert "measured; the budget is" in page
    assert "Where the law of the next token changed most" in page
    run = tmp_path / "stopped"
    settings_ = {"train": train, "optim": optim, "tune": {**adapters, "kl": most}}
    with pytest.raises(RuntimeError, match="killed"):
        tune(checkpoint("llama"), run, documents, Remembering(3), **settings_)
    pipeline.resume(run, Remembering(), changes={})
    assert bits(run) == bits(tmp_path / "kept")


def test_the_report_has_the_checkpoint_beside_what_became_of_it(
    checkpoint: Checkpoint, chat_run: Path
) -> None:
    """The measures before are those of the checkpoint, whatever training did since."""
    summary = read_sealed_json(chat_run / "summary.json")
    before, after = (summary["tuning"][when] for when in ("before", "after"))
    corpus, config = corpus_and_config(chat_run)
    started = load(checkpoint("llama")).model
    rows = document_batches(config, corpus, validation=True)
    expected = score_documents(started, rows, bytes=corpus.predicted_bytes(validation=True))
    for name in ("loss", "perplexity", "bits_per_byte", "tokens"):
        assert before[name] == pytest.approx(getattr(expected, name), rel=1e-5), name
        assert after[name] == pytest.approx(summary["validation"][name], rel=1e-5), name
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"]
    ids = rows.rows[0].inputs[rows.rows[0].segments == 0][None]  # type: ignore[index]
    q, k, v = _layer_inputs(started, ids)
    exact = torch.linalg.matrix_norm(_dense_jacobian(q, k, v), 2).item()
    lower, upper = before["sensitivity"][0]
    assert lower <= 1.001 * exact
    assert exact <= 1.001 * upper < 1.1 * exact
    assert "Before and after" in (chat_run / "report.html").read_text()


def _layer_inputs(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values of the first layer, keys and values of a group once."""
    found: list[torch.Tensor] = []

    def observe(layer: int, *qkv: torch.Tensor) -> None:
        if layer == 0:
            found.extend(x.detach().double() for x in qkv)

    model(ids, observe=observe)
    return found


def _dense_jacobian(*qkv: torch.Tensor) -> torch.Tensor:
    """The Jacobian of causal attention by autograd, every entry."""
    shapes = [x.shape for x in qkv]
    sizes = [x.numel() for x in qkv]

    def attention(flat: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, sizes)
        q, k, v = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        open_ = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return (scores.masked_fill(~open_, -torch.inf).softmax(-1) @ v).flatten()

    flat = torch.cat([x.flatten() for x in qkv])
    return torch.autograd.functional.jacobian(attention, flat, vectorize=True)


def test_the_memory_of_adapters_leaves_out_what_is_frozen(
    checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    said = [
        tune(checkpoint("llama"), tmp_path / name, documents, train={"steps": 1}, tune=lora)
        for name, lora in (("whole", {}), ("lora", {"rank": 1}))
    ]
    whole, lora = (
        next(line for line in callback.messages if line.startswith("A step needs about"))
        for callback in said
    )
    assert "gradients 0.1 MiB" in whole
    assert "gradients 0.0 MiB" in lora


@pytest.mark.parametrize("lora", [{}, {"rank": 2}], ids=["weights", "adapters"])
def test_blocks_that_are_recomputed_tune_to_the_same_bits_in_less_memory(
    lora: dict[str, Any], checkpoint: Checkpoint, documents: Path, tmp_path: Path
) -> None:
    needs = []
    for recompute in ("none", "block"):
        given = {"train": {"steps": 2, "recompute": recompute}, "tune": lora}
        said = tune(checkpoint("llama"), tmp_path / recompute, documents, **given).messages
        sentence = next(line for line in said if line.startswith("A step needs about"))
        needs.append(float(sentence.split("activations ")[1].split()[0]))
    assert bits(tmp_path / "block") == bits(tmp_path / "none")
    assert needs[1] < needs[0]


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What ``fenchel eval --json`` prints."""
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--device", "cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("text", ["documents", "chats", "plain"])
@pytest.mark.parametrize("lora", [{}, {"rank": 2}], ids=["weights", "adapters"])
def test_eval_of_a_tuned_run_is_the_validation_of_its_summary(
    text: str,
    lora: dict[str, Any],
    checkpoint: Checkpoint,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Documents that share rows, are divided or are conversations; the last step is the best."""
    if text == "plain":
        source = tmp_path / "plain.txt"
        source.write_text("the shells on the sea shore are sea shells. " * 60)
    else:
        source = request.getfixturevalue(text)
    train = {"steps": 3, "batch": 2, "evaluate_every": 3}
    optim = {"optimiser": "adamw", "learning_rate": 0.01}
    tune(checkpoint("llama"), tmp_path / "run", source, train=train, optim=optim, tune=lora)
    summary = read_sealed_json(tmp_path / "run" / "summary.json")
    assert summary["best_step"] == summary["step"]
    stated = summary["validation"]
    found = evaluated(capsys, tmp_path / "run")
    assert found["loss"] == pytest.approx(stated["loss"], abs=1e-5)
    assert found["bits_per_byte"] == pytest.approx(stated["bits_per_byte"], abs=1e-5)
    assert found["tokens"] == stated["tokens"]
    corpus, _ = corpus_and_config(tmp_path / "run")
    assert found["documents"] == corpus.facts.validation_documents
    trained = evaluated(capsys, tmp_path / "run", "--split", "train")
    assert trained["documents"] == corpus.facts.train_documents
    assert trained["loss"] != pytest.approx(stated["loss"], abs=1e-4)


def test_eval_of_documents_obeys_its_flags_or_refuses_them(
    checkpoint: Checkpoint,
    documents: Path,
    chat_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    tune(checkpoint("llama"), run, documents, train={"steps": 1})
    corpus, config = corpus_and_config(run)
    assert corpus.documents_of is not None
    held_out, model = corpus.documents_of[True], load(run).model
    whole = evaluated(capsys, run)
    first = evaluated(capsys, run, "--tokens", 50, "--calibration")
    rows = pack_documents(config, corpus, held_out.split(50)[0])
    assert first["tokens"] == 50
    expected = score_documents(model, rows, bytes=first["bytes"])
    assert first["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert first["bytes"] == round(whole["bytes"] * 50 / whole["tokens"])
    assert first["calibration"]["fitted_on"] == 25
    assert first["calibration"]["plain"]["predictions"] == 25
    short = evaluated(capsys, run, "--context", 20)
    rows = pack_documents(config, corpus, held_out, context=20)
    expected = score_documents(model, rows, bytes=whole["bytes"])
    assert short["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert short["loss"] != pytest.approx(whole["loss"], rel=1e-4)
    same = evaluated(capsys, run, "--against", checkpoint("llama"))
    assert same["against"]["tokens"] == same["tokens"]
    assert main(["eval", str(run), "--stride", "7"]) == 2
    assert "--stride is the distance of windows" in " ".join(capsys.readouterr().err.split())
    assert main(["eval", str(chat_run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Conversations are read one by one, 1 in all, by 96 tokens." in shown
    other = write_tokens(tmp_path / "other", checkpoint("llama"))
    assert main(["eval", str(chat_run), "--against", str(other)]) == 2
    assert "has another tokenizer" in " ".join(capsys.readouterr().err.split())


def write_tokens(path: Path, checkpoint: Path) -> Path:
    """A copy of a checkpoint whose tokenizer begins a text otherwise."""
    shutil.copytree(checkpoint, path)
    write_tokenizer(path, begins=False, template=None)
    return path
