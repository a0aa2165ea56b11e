"""fenchel certify on a run directory: the table, the page, the JSON, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from fenchel.cli import main
from fenchel.cli.inspection_tables import decision_table, substitution_tables
from fenchel.inspection_result import (
    Certificates,
    DecisionCertification,
    DecisionRow,
    LayerCertificate,
    SubstitutionCertification,
    SubstitutionRow,
)
from fenchel.report.certificates import certificates, render_decisions, render_substitutions


def arguments(run: Path, text: Path, *more: str) -> list[str]:
    short = ["--max-tokens", "8", "--steps", "2", "--restarts", "0"]
    return ["certify", str(run), "--text", str(text), *short, *more]


def test_a_table_and_a_page_come_out(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    line = arguments(run_directory, text_file, "--radius", "0.05", "--heads", "--out", str(out))
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "certificates over radius 0.05, all tokens together" in printed
    assert "largest upper ends" in printed
    page = out.read_text()
    assert "certified" in page
    assert "upper / lower" in page
    assert main(line) == 0  # a page of ours is written over


def test_json_is_one_object_and_writes_nothing(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ("--radius", "0.05", "--norm", "token", "--layers", "1", "--json")
    assert main(arguments(run_directory, text_file, *more)) == 0
    found = json.loads(capsys.readouterr().out)["certificates"]
    assert (found["radius"], found["norm"]) == (0.05, "token")
    (layer,) = found["layers"]
    assert layer["refused"] is None
    assert layer["centre"]["lower"] <= layer["lower"] <= layer["upper"] < 100 * layer["lower"]
    assert len(layer["moved"]) == 8
    assert list(tmp_path.iterdir()) == []


def test_a_lipschitz_constant_is_printed_from_both_sides(
    run_directory: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["certify", str(run_directory), "--text", str(text_file), "--lipschitz"]
    assert main([*line, "--max-tokens", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.0 < found["attacked"] < found["certified"]
    assert main([*line, "--max-tokens", "6"]) == 0
    assert f"certified  {found['certified']:.6g} " in capsys.readouterr().out
    for flag in (["--decision"], ["--radius", "1"], ["--steps", "3"], ["--out", "page.html"]):
        assert main([*line, *flag]) == 2
        assert "--lipschitz reads" in capsys.readouterr().err


def test_blocks_are_certified_as_a_whole(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    line = arguments(run_directory, text_file, "--radius", "1e-3", "--blocks", "--out", str(out))
    assert main(line) == 0
    assert "the Jacobian of the block, in the stream" in " ".join(capsys.readouterr().out.split())
    assert "about the input of each block" in out.read_text()
    assert main([*line[:-2], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["certificates"]
    assert found["level"] == "block"
    for layer in found["layers"]:
        assert layer["centre"]["lower"] <= layer["lower"] <= layer["upper"]


def test_inspect_adds_the_same_certificates(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    line = ["inspect", str(run_directory), "--text", str(text_file), "--max-tokens", "8"]
    line += ["--no-blocks", "--layers", "1", "--radius", "0.05", "--json", "--out", str(out)]
    assert main(line) == 0
    inspected = json.loads(capsys.readouterr().out)["certificates"]
    assert main(arguments(run_directory, text_file, "--radius", "0.05", "--json")) == 0
    certified = json.loads(capsys.readouterr().out)["certificates"]
    assert len(inspected["layers"]) == 1
    for name in ("upper", "token_norm"):  # the lower end follows from random starts
        assert inspected["layers"][0][name] == pytest.approx(certified["layers"][0][name], rel=1e-2)
    assert "Witnesses" in out.read_text()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--radius", "-1"], "a radius is a finite number >= 0"),
        (["--radius", "nan"], "a radius is a finite number >= 0"),
        (["--radius", "0.1", "--layers", "9"], "there is no layer 9"),
        (["--radius", "0.1", "--norm", "max"], "norm"),
        ([], "radius"),
    ],
)
def test_a_mistake_is_one_sentence(
    more: list[str],
    sentence: str,
    run_directory: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(run_directory, text_file, *more)) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_verdict_of_thousands_is_written() -> None:
    layers = [
        LayerCertificate(layer=1, lower=1.0, upper=6311.4, moved=[0.9, 0.1]),
        LayerCertificate(layer=2, lower=1.0, upper=9.5, moved=[0.9, 0.1]),
    ]
    tokens = ["a", "b"]
    data = Certificates(level="block", radius=1.0, norm="fro", dtype="float64", layers=layers)
    assert "All 2 blocks are certified within 9.50 to 6,312 times" in str(
        certificates(data, tokens)
    )


def test_a_radius_that_says_nothing_is_called_vacuous() -> None:
    row = DecisionRow(
        position=0,
        token="a",
        kept=["b"],
        rival="c",
        margin=1.0,
        certified=1e-6,
        attacked=1.0,
        first_order=1.0,
        moved=[1.0],
        parts={},
        stages={"block 1 attention": 0.5, "block 1 MLP": 0.25},
    )
    result = DecisionCertification(
        subject={"name": "a model", "family": "a family"},
        text="a text",
        tokens=["a"],
        norm="all",
        keep=1,
        token_norm=1.0,
        complete=True,
        rows=[row, replace(row, certified=0.1)],
        seconds={},
    )
    assert "(1 vacuous)" in decision_table(result).title
    assert [one["vacuous"] for one in result.plain()["rows"]] == [True, False]
    assert result.plain()["rows"][1]["loses_most"] == "block 1 attention"
    page = render_decisions(result)
    assert ">vacuous<" in page
    assert "block 1 attention" in page
    rows = [replace(row, position=t, searched=t < 2, attempted=t != 1) for t in range(5)]
    cut = replace(result, complete=False, rows=rows)
    left = "no radius was found at 2 to 4, no attack was made at 1"
    assert cut.not_reached == left
    assert left in render_decisions(cut)
    table = decision_table(cut)
    assert left in str(table.caption)
    assert "not reached" in list(table.columns[4].cells)
    assert [one["vacuous"] for one in cut.plain()["rows"]] == [True, True, False, False, False]


def test_decisions_as_a_table_a_page_and_json(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    line = ["certify", str(run_directory), "--text", str(text_file), "--decision"]
    line += ["--max-tokens", "4", "--norm", "one"]
    assert main([*line, "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "decisions about the next token; moved: the last token read, alone" in printed
    assert "certified attacked ratio" in printed
    page = out.read_text()
    assert "loses most" in page
    assert "block 1 " in page
    assert "Certified &lt;= the true radius &lt;= attacked" in page
    assert main([*line, "--json", "--keep", "2", "--budget", "60s"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["norm"], found["keep"], len(found["rows"])) == ("one", 2, 4)
    for row in found["rows"]:
        assert 0.0 <= row["certified"] <= row["attacked"]
        assert row["ratio"] == row["certified"] / row["attacked"]
        assert len(row["kept"]) == 2
        assert not row["vacuous"]
        assert row["loses_most"] == max(row["stages"], key=row["stages"].get)
        assert row["loses_most"].startswith("block ")
        assert len(row["moved"]) == row["position"] + 1


def test_substitutions_as_tables_a_page_and_json(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "page.html", tmp_path / "words.json"
    line = ["certify", str(run_directory), "--text", str(text_file), "--decision"]
    line += ["--max-tokens", "12", "--synonyms", str(words)]
    words.write_text('{"peace": ["trade", "<b>"], "the": ["of"], "of": ["the"]}')
    assert main([*line, "--json"]) == 2
    assert "<b>', an alternative of 'peace', is" in " ".join(capsys.readouterr().err.split())
    words.write_text('{"peace": ["trade", "nation"], "trade": ["peace"]}')
    assert main([*line, "--json", "--substitutions", "2", "--texts", "400"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"]
    assert found["alternatives"]
    for row in found["rows"]:
        assert row["certified"] <= row["most"] <= 2
        assert row["attacked"] is None or row["certified"] < row["attacked"] <= 2
        assert row["how"] in ("exact", "read", "bound")
        assert row["read"] <= min(401, row["allowed"])
        assert len(row["witness"]) == (row["attacked"] or 0)
    assert main([*line, "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "substitutions allowed" in printed
    assert "at after next token of certified attacked how texts" in printed
    assert "How many tokens may be substituted at once" in out.read_text()


def test_substitutions_that_change_a_decision_are_listed() -> None:
    row = SubstitutionRow(
        position=3,
        token=" the",
        kept=[" Senate"],
        margin=1.5,
        certified=1,
        attacked=2,
        most=3,
        read=7,
        allowed=27,
        how="read",
        witness={"1": [" a", " [b]"], "3": [" the", " this"]},
    )
    result = SubstitutionCertification(
        subject={"name": "x", "family": "y", "parameters": 1, "context": 4, "stored": "z"},
        text="t",
        tokens=["a", "b", "c", "d"],
        alternatives={" a": [" [b]"]},
        keep=1,
        complete=False,
        refused="block 1 chooses otherwise.",
        rows=[row, replace(row, certified=3, attacked=None, witness={})],
        seconds={},
    )
    assert [one["safe"] for one in result.plain()["rows"]] == [False, True]
    sets, counts, changes = substitution_tables(result)
    assert "(ended by --budget)" in str(counts.title)
    assert "no bound: block 1 chooses otherwise." in str(counts.caption)
    assert list(counts.columns[4].cells) == ["1", "all"]
    assert "' [b]'" in Text.from_markup(next(iter(sets.columns[1].cells))).plain
    assert next(iter(changes.columns[1].cells)).startswith("1 ' a' to ")
    page = render_substitutions(result)
    assert "changes the next token at 1 of 2 positions that have any" in page
    assert "There is no bound beyond the texts that were read" in page
    assert "1 &#x27; a&#x27; to" in page or "1 ' a' to" in page


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "give --radius R to certify layers, --decision"),
        (["--decision", "--max-tokens", "0"], "max_tokens=0 should be 2 or more"),
        (["--decision", "--radius", "1"], "--radius is read without --decision only"),
        (["--decision", "--blocks"], "--blocks is read without --decision only"),
        (["--radius", "1", "--keep", "2"], "--keep is read with --decision only"),
        (["--radius", "1", "--norm", "one"], "--norm is fro, token without --decision"),
        (["--decision", "--norm", "fro"], "--norm is all, token, one with --decision"),
        (["--decision", "--budget", "soon"], "should be a time such as 90s"),
        (["--radius", "1", "--synonyms", "x"], "--synonyms is read with --decision only"),
        (["--decision", "--texts", "5"], "--texts is read with --synonyms only"),
        (["--decision", "--substitutions", "5"], "--substitutions is read with --synonyms only"),
        (["--decision", "--synonyms", "x", "--norm", "one"], "leave it out with --synonyms"),
        (["--decision", "--synonyms", "none.json"], "none.json"),
    ],
)
def test_flags_of_the_other_kind_are_refused(
    run_directory: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    assert main(["certify", str(run_directory), "--text", str(text_file), "--json", *more]) == 2
    assert sentence in capsys.readouterr().err
