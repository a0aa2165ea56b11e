"""fenchel/report/run_page.py: a page comes out of any run, and no run can make it do anything."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fenchel.report import page
from fenchel.report.run_data import CONSEQUENCES

MakeRun = Callable[..., Path]
MakeOutline = Callable[[str], Any]

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><style>*{display:none}",
    "</script><script>alert(1)</script>",
    "<!-- ",
    "]]>",
    "javascript:alert(1)",
    "{{7*7}}",
    "$title ${data} $script",
    "\x1b[31mred\x1b[0m\x07",
    "line\nbreak\r\nand\ttab",
    "=cmd()|' /C calc'!A0",
    "\u202eright to left\u2028",
    "&lt;b&gt; &amp; &#60;",
    "http://example.org/a.js",
    "\x00",
)


def toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def small(make_run: MakeRun, text: str) -> Path:
    """A run in which ``text`` stands wherever words can stand."""
    name = re.sub(r"[/\x00\ud800-\udfff]", "_", text)[:40]
    folder = make_run(f"r{name}", layers=1, heads=1, steps=20, size=3)
    word = toml_string(f"x{text}")
    (folder / "config.toml").write_text(f"{word} = {word}\n[{word}]\n{word} = [{word}, 1]\n")
    (folder / "environment.json").write_text(json.dumps({f"x{text}": f"x{text}", "n": 1}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, f"x{text}": text, f"y{text}": 2.0}) + "\n")
    for file, changes in (
        (
            "summary.json",
            {
                "status": f"x{text}",
                "reason": f"x{text}",
                "text": {f"x{text}": f"x{text}", "z": {f"x{text}": 1}},
                "baselines": {f"x{text}": 1.5, "ngram5": 1.6},
            },
        ),
        ("sample.json", {"prompt": text, "text": text, "sentence": text, "tokens": [text] * 3}),
    ):
        known = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**known, **changes}))
    return folder


def written(folder: Path) -> str:
    return page(folder).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(make_run: MakeRun) -> str:
    return written(make_run())


@pytest.fixture(scope="module")
def harmless(make_run: MakeRun, outline: MakeOutline) -> Any:
    return outline(written(small(make_run, "word")))


@settings(max_examples=60)
@given(text=st.sampled_from(HOSTILE) | st.text(max_size=30))
def test_a_hostile_name_makes_no_element_and_no_attribute(
    make_run: MakeRun, outline: MakeOutline, harmless: Any, text: str
) -> None:
    found = outline(written(small(make_run, text)))
    assert found.elements == harmless.elements
    assert found.attributes == harmless.attributes
    assert not found.strays


@pytest.mark.parametrize("text", HOSTILE)
def test_every_known_attack_stays_text(
    make_run: MakeRun, outline: MakeOutline, harmless: Any, text: str
) -> None:
    html = written(small(make_run, text))
    found = outline(html)
    assert found.elements == harmless.elements
    assert found.attributes == harmless.attributes
    assert found.text["style"] == harmless.text["style"]
    assert found.text["script"][1] == harmless.text["script"][1]
    pictures = json.loads(found.text["script"][0])["pictures"]
    names = [bar["name"] for bar in pictures["baselines"]["bars"]]
    names += pictures["attention"]["tokens"]
    assert len(names) == 6
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", html + "".join(names))
    assert not any(name.startswith("on") or name == "style" for _, name in found.attributes)


def test_nothing_comes_from_outside(whole: str, outline: MakeOutline) -> None:
    assert set(re.findall(r"\w+://[^\s\"'<)]*", whole)) == {"http://www.w3.org/2000/svg"}
    found = outline(whole)
    assert all(value.startswith("#") for _, name, value in found.values if name == "href")
    loading = {
        "src",
        "srcset",
        "action",
        "formaction",
        "data",
        "background",
        "poster",
        "xlink:href",
    }
    assert not {name for _, name in found.attributes} & loading
    assert not found.elements.keys() & {"link", "img", "iframe", "object", "embed", "base", "form"}


def test_every_picture_has_its_data_and_its_numbers_in_a_table(
    whole: str, outline: MakeOutline
) -> None:
    found = outline(whole)
    pictures = json.loads(found.text["script"][0])["pictures"]
    drawn = found.value("div", "data-picture")
    assert drawn == list(pictures)
    assert {data["view"] for data in pictures.values()} == {
        "bars",
        "lineChart",
        "strips",
        "attention",
    }
    assert drawn == [
        *("baselines", "loss", "bits", "perplexity", "rate", "gradient", "speed"),
        *("entropy", "effective", "max-logit"),  # every key has a weight under softmax
        *("head-max-logit", "head-rms", "head-entropy", "attention"),
    ]
    figures = re.findall(r"<figure.*?</figure>", whole, re.S)
    assert len(figures) == len(drawn)
    assert all(figure.count("<table") == 1 == figure.count("<details") for figure in figures)


def test_the_page_has_the_structure_that_screen_readers_need(
    whole: str, outline: MakeOutline
) -> None:
    found = outline(whole)
    assert not found.strays
    assert found.value("html", "lang") == ["en"]
    assert found.elements["h1"] == 1
    names = [value for _, name, value in found.values if name == "id"]
    assert len(names) == len(set(names))
    targets = [value[1:] for _, name, value in found.values if name == "href"]
    assert set(targets) <= set(names)
    assert found.elements["table"] == found.elements["caption"]
    assert len(found.value("th", "scope")) == found.elements["th"]


def test_the_numbers_of_the_run_stand_on_the_page(whole: str, outline: MakeOutline) -> None:
    text = outline(whole).text["main"][0]
    for expected in (
        "1.647",
        "bzip2 -9",
        "1.775",
        "5-gram",
        "1.569",
        "Fellow-Citizens",
        "rotary",
        "2.13.0",
    ):
        assert expected in text
    assert "The model needs 1.647: below bzip2 -9 (1.775), not below 5-gram (1.569)." in text
    assert (
        "at step 1,000 of 1,000. 2.17 M parameters, 4.10 M tokens of training, 2 min 41 s."
        in (outline(whole).text["header"][0])
    )


@pytest.mark.parametrize("name", CONSEQUENCES)
def test_a_missing_file_is_reported_and_the_rest_is_shown(
    make_run: MakeRun, outline: MakeOutline, name: str
) -> None:
    folder = make_run()
    (folder / name).unlink()
    found = outline(written(folder))
    assert f"{name} is missing: {CONSEQUENCES[name]}." in found.text["main"][0]
    expected = {
        "metrics.jsonl": {"baselines", "attention"},
        "sample.json": {"baselines", "loss", "entropy"},
    }
    drawn = set(found.value("div", "data-picture"))
    assert expected.get(name, {"attention", "loss", "entropy"}) <= drawn
    assert not found.strays


@pytest.mark.parametrize("name", CONSEQUENCES)
def test_a_file_cut_anywhere_still_gives_a_page(
    make_run: MakeRun, outline: MakeOutline, name: str
) -> None:
    folder = make_run(layers=1, heads=1, steps=20, size=3)
    content = (folder / name).read_bytes()
    for part in range(12):
        (folder / name).write_bytes(content[: len(content) * part // 12])
        assert not outline(written(folder)).strays


@settings(max_examples=40)
@given(name=st.sampled_from(list(CONSEQUENCES)), content=st.binary(max_size=200))
@example(name="metrics.jsonl", content=b'{"step": 1, "train/loss": NaN}\n')
@example(
    name="metrics.jsonl",
    content=b'{"step": 1, "train/loss": 1e308, "attention/entropy": [Infinity]}\n',
)
@example(name="metrics.jsonl", content=b'{"step": 1, "train/loss": -1, "attention/entropy": []}\n')
@example(
    name="summary.json",
    content=b'{"status": [], "reason": {}, "step": "x", "steps": {}, "tokens": NaN}',
)
@example(
    name="summary.json",
    content=b'{"validation": 7, "baselines": [1], "text": 3, "best_step": Infinity}',
)
@example(
    name="summary.json",
    content=b'{"validation": {"bits_per_byte": "nan"}, "baselines": {"a": "inf"}}',
)
@example(name="sample.json", content=b'{"text": 3, "prompt": [], "tokens": {}, "attention": 1}')
@example(name="environment.json", content=b'{"a": {"b": [[1]]}, "c": null, "d": "\\ud800"}')
def test_a_file_of_nonsense_still_gives_a_page(
    make_run: MakeRun, outline: MakeOutline, name: str, content: bytes
) -> None:
    folder = make_run(layers=1, heads=1, steps=20, size=3)
    (folder / name).write_bytes(content)
    found = outline(written(folder))
    assert not found.strays
    json.loads(found.text["script"][0])


def test_a_run_that_diverged_shows_where_and_draws_the_rest(
    make_run: MakeRun, outline: MakeOutline
) -> None:
    folder = make_run(
        status="diverged", reason="three losses in a row were not finite; layer 3 first"
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] > 900 and "train/loss" in line:
            line |= {
                "train/loss": "nan",
                "train/gradient_norm": "inf",
                "attention/entropy": ["nan"] * 4,
            }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = outline(written(folder))
    assert "Diverged" in found.text["header"][0]
    assert "layer 3 first" in found.text["header"][0]
    main = found.text["main"][0]
    assert "10 values are not finite (training, between steps 910 and 1,000)" in main
    pictures = json.loads(found.text["script"][0])["pictures"]
    assert pictures["loss"]["series"][0]["y"][-1] is None
    assert pictures["entropy"]["layers"][0][-1] is None
    assert pictures["entropy"]["most"] > pictures["entropy"]["least"] == 0


def test_settings_that_differ_from_the_default_run_come_first(
    make_run: MakeRun, outline: MakeOutline
) -> None:
    folder = make_run()
    assert "default run" not in written(folder)
    changed(folder, "summary.json", defaults={})
    assert "All settings are those of the default run." in written(folder)
    defaults = {"seed": 7, "model": {"width": 128, "gone": None}, "train": {"betas": [0.9, 0.99]}}
    changed(folder, "summary.json", defaults=defaults)
    body = written(folder).partition('id="settings"')[2]
    first = outline(body[: body.index("</table>") + 8])
    assert first.text["caption"] == ["differs from the default run"]
    assert first.text["tr"][1:] == [
        "seed07",
        "model.width192128",
        "model.gonenonenone",
        "train.betas0.9, 0.950.9, 0.99",
    ]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("finished", "Finished at step"),
        ("interrupted", "Interrupted at step"),
        ("running", "still running when this page was written"),
        ("odd", "Unknown end at step"),
    ],
)
def test_the_header_states_how_the_run_ended(
    make_run: MakeRun, outline: MakeOutline, status: str, said: str
) -> None:
    folder = make_run(steps=20, status=status)
    assert said in outline(written(folder)).text["header"][0]


def test_without_a_summary_the_last_evaluation_stands_in(
    make_run: MakeRun, outline: MakeOutline
) -> None:
    folder = make_run()
    (folder / "summary.json").unlink()
    found = outline(written(folder))
    assert (
        "1.647bits per byte of held-out text, at the last evaluation, step 1,000"
        in found.text["main"][0]
    )
    assert "Unknown end at step 1,000." in found.text["header"][0]


def test_a_baseline_that_can_be_none_is_left_out(make_run: MakeRun, outline: MakeOutline) -> None:
    folder = make_run(steps=20)
    known = json.loads((folder / "summary.json").read_text())
    odd = {"zero": 0, "less": -1, "much": 1e6, "none": None, "word": "x", "nan": "nan", "xz": 1.5}
    (folder / "summary.json").write_text(json.dumps({**known, "baselines": odd}))
    pictures = json.loads(outline(written(folder)).text["script"][0])["pictures"]
    assert [bar["name"] for bar in pictures["baselines"]["bars"]] == ["this model", "xz -9"]
    assert pictures["bits"]["references"] == [{"name": "xz -9", "value": 1.5}]


def test_maps_of_a_long_context_fit_in_a_page(make_run: MakeRun, outline: MakeOutline) -> None:
    html = written(make_run(layers=2, heads=2, steps=20, size=256))
    assert 2 * 2 * 256 * 256 < len(html) < 800_000
    assert json.loads(outline(html).text["script"][0])["pictures"]["attention"]["size"] == 256


def test_a_million_tokens_of_sample_text_are_cut(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    known = json.loads((folder / "sample.json").read_text())
    (folder / "sample.json").write_text(json.dumps({**known, "text": "word " * 10**6}))
    assert len(written(folder)) < 500_000


def test_the_same_run_gives_the_same_bytes(make_run: MakeRun) -> None:
    assert written(make_run(seed=3)) == written(make_run(seed=3))


def test_a_page_is_replaced_whole_and_leaves_nothing_beside_it(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    before = {file.name for file in folder.iterdir()}
    (folder / "report.html").write_text("old")
    assert page(folder) == folder / "report.html"
    assert {file.name for file in folder.iterdir()} == before | {"report.html"}
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the folder that a training run wrote"):
        page(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_page_needs_no_torch(make_run: MakeRun) -> None:
    code = (
        "import sys; from pathlib import Path; from fenchel.report import page;"
        "page(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(make_run(steps=20))], check=True)


def changed(folder: Path, file: str, **changes: Any) -> None:
    known = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**known, **changes}))


@pytest.mark.parametrize(("tokens", "differ"), [(50_000, True), (16_385, False), (900, False)])
def test_the_curves_state_that_they_cover_a_part_of_the_text(
    make_run: MakeRun, tokens: int, differ: bool
) -> None:
    """The result is of all tokens, the curves of the first 16,384: two numbers for one step."""
    folder = make_run("part")
    (folder / "config.toml").write_text("[train]\nevaluate_tokens = 16384\n")
    changed(
        folder,
        "summary.json",
        text={"validation_tokens": tokens},
        validation={"loss": 3.9, "bits_per_byte": 1.291, "tokens": tokens - 1},
    )
    html = written(folder)
    assert f"bits per byte of held-out text, all {tokens - 1:,} tokens of it" in html
    assert (f"its first 16,384 tokens of {tokens:,}. The result above is of all" in html) == differ


def test_the_sample_and_the_next_command_come_before_the_curves(make_run: MakeRun) -> None:
    folder = make_run("my run")
    changed(folder, "sample.json", prompt="It's a long way to go")
    html = written(folder)
    places = [html.index(f'id="{anchor}"') for anchor in ("result", "sample", "next", "learning")]
    assert places == sorted(places)
    told = "fenchel generate 'my run' --prompt 'It'\"'\"'s a long'"
    assert escape(told) in html
    assert "--resume" not in html
    changed(folder, "summary.json", status="interrupted")
    assert escape("fenchel train --resume 'my run'") in written(folder)


def test_a_run_of_conversations_is_continued_by_a_conversation(make_run: MakeRun) -> None:
    folder = make_run("chats")
    changed(folder, "summary.json", text={"validation_answer_bytes": 9})
    html = written(folder)
    assert "fenchel chat chats" in html
    assert "fenchel eval chats --text FILE" in html  # without a text it is refused
    assert "fenchel generate chats" not in html


def test_baselines_that_were_not_computed_state_the_reason(make_run: MakeRun) -> None:
    folder = make_run("long")
    changed(folder, "summary.json", baselines={}, no_baselines="the text has <300> MiB.")
    assert "The baselines were not computed: the text has &lt;300&gt; MiB." in written(folder)
