"""Small trained models with a beginning, special ids and a chat template of their own.

Random weights hide a wrong beginning: nothing depends on it. Here the words of a text follow from
its beginning, so that a text that begins otherwise is continued by other words.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, processors

from fenchel.checkpoints import load
from fenchel.checkpoints.tokenizer import read_chat_template
from fenchel.cli import main
from fenchel.generation import generate
from tests.model.families.conftest import ALL, COMMON, GEMMA4, GROUPED, NEAR, distinctive

START, STOP, MASK = 11, 12, 13
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
IDS = {"bos_token_id": START, "eos_token_id": STOP, "pad_token_id": 14}


def trained(model: Any, inputs: torch.Tensor, targets: torch.Tensor, steps: int) -> Any:
    """With the loss of ``targets`` where they are not -100 made small."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        logits = model.train()(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.05
    return model.eval()


DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "NanoChat": ("NanoChatConfig", {**GROUPED, "num_hidden_layers": 2}),
    "Qwen3_5": ("Qwen3_5TextConfig", {**GROUPED, **DELTA, "num_hidden_layers": 2}),
    "Gemma4": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": [NEAR, ALL, NEAR, ALL],
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
        },
    ),
}


@pytest.fixture(scope="module", params=DECODERS)
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A decoder whose texts count from 20 after <start>, and from 40 without it, to <stop>."""
    path, count = tmp_path_factory.mktemp(request.param), torch.arange(8)
    kind, settings = DECODERS[request.param]
    config = getattr(transformers, kind)(**{**settings, **IDS})
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    first = torch.tensor([[15], [16], [17]])
    after_start = torch.cat((torch.full((3, 1), START), first, (20 + count).expand(3, 8)), 1)
    without = torch.cat((first, (40 + count).expand(3, 8), torch.full((3, 1), STOP)), 1)
    rows = torch.cat((after_start, without))
    targets = torch.cat((rows[:, 1:], torch.full((6, 1), STOP)), 1)
    targets[:3, 0] = targets[3:, -1] = -100  # the first word, and what follows <stop>
    trained(model, rows, targets, 60).save_pretrained(path)
    distinctive(path, template=True)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"do_sample": False}))
    return model, path


def test_a_decoder_begins_as_it_was_trained(
    decoder: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = decoder
    flags = ["--temperature", "0", "--repetition-penalty", "1", "--device", "cpu", "--json"]
    assert main(["generate", str(path), "--prompt", "w16", "--max-new-tokens", "20", *flags]) == 0
    found = json.loads(capsys.readouterr().out)["text"]
    assert found.split()[-8:] == [f"w{20 + n}" for n in range(8)]


def test_the_perplexity_of_a_decoder_is_that_of_its_own_beginning(
    decoder: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = decoder
    text = tmp_path / "text.txt"
    text.write_text(" ".join(["w16", *(f"w{20 + n}" for n in range(8))]))
    assert main(["eval", str(path), "--text", str(text), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ids = torch.tensor([tokenizer(text.read_text())["input_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    assert found["perplexity"] == pytest.approx(expected, rel=1e-3)
    with torch.no_grad():
        other = model(ids[:, 1:]).logits[0, :-1].double()
    own = torch.nn.functional.cross_entropy(logits[1:], ids[0, 2:])
    assert torch.nn.functional.cross_entropy(other, ids[0, 2:]) > 0.5 > 10 * own


def test_a_conversation_begins_with_its_template(decoder: tuple[Any, Path]) -> None:
    _, path = decoder
    template, (model, tokenizer, _) = read_chat_template(path), load(path)
    assert template is not None
    messages = [{"role": "user", "content": "w17"}]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    expected = theirs.apply_chat_template(messages, return_dict=False)
    ids = template.encode(tokenizer, messages, add_generation_prompt=True)
    assert ids == expected == [START, 17]
    answer = generate(model, torch.tensor([ids]), max_new_tokens=8, temperature=0.0)
    assert answer[0, 2:].tolist() == [*range(20, 28)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A RoBERTa for texts <start> w20 w21 ... <stop>, whose words are known by their positions."""
    path, count = tmp_path_factory.mktemp("roberta"), torch.arange(8)
    settings = {**COMMON, **IDS, "pad_token_id": 1, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**settings))
    text = torch.cat((torch.tensor([START]), 20 + count, torch.tensor([STOP])))
    rows, targets = text.repeat(8, 1), torch.full((8, 10), -100)
    for n in range(8):  # all but one word are masked: only positions tell which is which
        hidden = [m for m in range(1, 9) if m != n + 1]
        rows[n, hidden], targets[n, hidden] = MASK, text[hidden]
    trained(model, rows, targets, 60).save_pretrained(path)
    distinctive(path, template=True)
    return model, path


def test_an_encoder_reads_a_text_between_its_own_tokens(encoder: tuple[Any, Path]) -> None:
    _, path = encoder
    file = Tokenizer.from_file(str(path / "tokenizer.json"))
    file.post_processor = processors.TemplateProcessing(
        single="<start> $A <stop>", special_tokens=[("<start>", START), ("<stop>", STOP)]
    )
    file.save(str(path / "tokenizer.json"))
    model, tokenizer, config = load(path)
    text = "w20 w13 w22 w13 w13 w25 w26 w27"  # w13 is the token of the mask
    ids = torch.tensor([tokenizer.encode_whole(text)])
    assert ids[0, [0, -1]].tolist() == [START, STOP]
    assert config.context == 62
    with torch.no_grad():
        best = model(ids).argmax(-1)[0]
        without = model(ids[:, 1:-1]).argmax(-1)[0]
    assert best[[2, 4, 5]].tolist() == [21, 23, 24]
    assert without[[1, 3, 4]].tolist() != [21, 23, 24]
