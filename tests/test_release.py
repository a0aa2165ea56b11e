"""The files around the package: workflows, forms, log, site, examples, notebook, version."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import fenchel

ROOT = Path(fenchel.__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SETTINGS = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]


def script(path: str) -> ModuleType:
    """A program of the repository that is not in a package."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- workflows and forms


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.name)
def test_settings_of_the_repository_are_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def uses(value: Any) -> Iterator[str]:
    """Every action that a workflow names."""
    if isinstance(value, dict):
        yield from (one for key, one in value.items() if key == "uses" and isinstance(one, str))
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from uses(inner)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_their_version_beside(path: Path) -> None:
    named = list(uses(yaml.safe_load(path.read_text())))
    assert named
    for action in named:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.search(rf"{re.escape(action)} # v\d+\.\d+\.\d+$", path.read_text(), re.MULTILINE)


def test_one_action_has_one_commit() -> None:
    every = {one for path in WORKFLOWS for one in uses(yaml.safe_load(path.read_text()))}
    assert len({one.partition("@")[0] for one in every}) == len(every)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_only_unless_a_job_says_more(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or "permissions" in job, name
        assert set(job.get("permissions", {})) <= {"id-token", "pages"}


def test_the_workflow_tests_every_supported_version_of_torch() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    versions = jobs["linux"]["strategy"]["matrix"]["torch"]
    (torch,) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    low, high = torch
    assert versions == [f"2.{minor}.0" for minor in range(int(low), int(high))]
    assert set(jobs["elsewhere"]["strategy"]["matrix"]["os"]) == {"macos-latest", "windows-latest"}


def test_paths_and_targets_of_workflows_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text()
        assert set(re.findall(r"run: make (\w+)", text)) <= targets
        assert all((ROOT / one).exists() for one in re.findall(r"\btests/[\w/.]+", text))


def test_the_hooks_run_the_tools_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    for hook in hooks:
        assert hook["entry"].removeprefix(".venv/bin/") in lint


# --- the version


def test_the_version_is_the_same_everywhere() -> None:
    version = fenchel.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )


KEPT = set(
    (
        "ALiBi AttentionSpec Capped Causal Dense Entmax Global Hard ModelConfig Muon Padding "
        "Prior RelativeBias ScoreDescent ScoreTrust Segments Sigmoid Sink Softmax Sparsemax "
        "Transformer Window ablate attach attend attend_jvp attention_jacobian attention_pairs "
        "certify certify_decision generate inspect jacobian kkt lens load patch rotary save "
        "self_attention_jacobian singular_values spectral_norm "
    ).split()
)
"""The names at the top of 0.1.0. One that is to go works for one more minor version, and warns."""


def test_the_names_of_the_last_release_are_at_the_top() -> None:
    assert set(fenchel.__all__) >= KEPT


def test_the_changelog_is_one_page() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text()) < 8000


# --- the log, the site, the notebook


def test_the_index_of_the_log_is_written_by_its_script() -> None:
    log = script("docs/log.py")
    assert log.INDEX.read_text() == log.index(), "run python docs/log.py"


def test_an_entry_of_the_index_page_becomes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = script("docs/log.py")
    monkeypatch.setattr(log, "INDEX", tmp_path / "log.md")
    monkeypatch.setattr(log, "FOLDER", tmp_path / "log")
    (tmp_path / "log").mkdir()
    entry = (
        "## 2026-11-20 · Is it so?\n\n**Asked.** See [this](a.md).\n\n"
        "**Conclusion.** It is so in all cases\nthat were tried. And more.\n"
    )
    (tmp_path / "log.md").write_text(f"# Log\n\n{entry}")
    log.move_entries()
    (file,) = (tmp_path / "log").iterdir()
    assert file.name == "2026-11-20-is-it-so.md"
    assert "[this](../a.md)" in file.read_text()
    row = "| [Is it so?](log/2026-11-20-is-it-so.md) | It is so in all cases that were tried. |"
    assert log.index().endswith(f"\n## 2026-11-20\n\n| question | answer |\n| --- | --- |\n{row}\n")
    file.write_text(
        file.read_text().replace("**Asked", "**Answer.** Yes: always. And so on.\n\n**Asked")
    )
    assert "| Yes: always. And so on. |" in log.index()


def test_an_answer_of_the_index_is_a_sentence() -> None:
    log = script("docs/log.py")
    answers = re.findall(r"^\| \[.*\| (.*) \|$", log.index(), re.MULTILINE)
    assert len(answers) == len(list(log.FOLDER.glob("*.md")))
    assert not [answer for answer in answers if not re.search(r"\.`?$", answer)]
    assert not [answer for answer in answers if re.match(r"[a-z]", answer)]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    pytest.importorskip("latex2mathml")
    site = script("docs/site.py")
    named = {name for names in site.NAVIGATION.values() for name in names.split()} - {"API"}
    paths = [path.relative_to(site.DOCS) for path in site.DOCS.rglob("*.md")]
    pages = {path.with_suffix("").as_posix() for path in paths}
    pages = {page for page in pages if not page.startswith("log/")}
    moved = {Path(page).stem for page in site.MOVED.values()} - {"index"}
    assert named == pages | moved | {"commands"}
    assert all((ROOT / page).exists() for page in site.MOVED)


def test_the_pages_of_the_site_have_their_links_pictures_and_formulas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("latex2mathml")
    site = script("docs/site.py")
    monkeypatch.setenv("RELEASES", "0.1.0 0.2.0")
    site.write(tmp_path / "source")
    heading, versions = (tmp_path / "source/index.md").read_text().split("\n\n")[:2]
    assert heading == "# fenchel"
    assert '<a href="0.2.0/index.html">0.2.0</a>' in versions
    for page in (tmp_path / "source").rglob("*.md"):
        outside_code = "".join(site.CODE.split(page.read_text())[::2])
        for target, _ in site.LINK.findall(outside_code):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    choice = (tmp_path / "source/maths/choice.md").read_text()
    assert "<math" in choice
    assert "$" not in "".join(site.CODE.split(choice)[::2])
    commands = (tmp_path / "source/commands.md").read_text()
    assert all(f"\n### {name}\n" in commands for name in ("train", "inspect", "bench"))
    attention = (tmp_path / "source/api/fenchel.attention.md").read_text()
    assert "### attend\n" in attention


def test_formulas_fit_a_phone() -> None:
    pytest.importorskip("latex2mathml")
    site = script("docs/site.py")
    apart = site.formulas(r"$$V = \max_p f(p), \qquad J = \nabla V.$$")
    assert apart.count("<math") == 2  # the style sheet lets parts go below one another
    assert "<munder><mo>max</mo><mi>p</mi></munder>" in apart
    assert site.formulas(r"$-p \log p$").count("<mspace") == 2
    assert "<mspace" not in site.formulas(r"$\log(p)$")
    assert "class" not in site.formulas("the $x_i$")
    assert site.formulas(f"the ${' + '.join(12 * 'x')}$").startswith('the <span class="long"><math')
    styles = (site.DOCS / "site.css").read_text()
    assert "flex-wrap: wrap" in styles
    assert ".long {" in styles


def test_the_notebook_is_made_from_the_readme() -> None:
    notebook = script("docs/notebook.py")
    text = notebook.FILE.read_text()
    assert text == notebook.notebook(), "run python docs/notebook.py"
    cells = json.loads(text)["cells"]
    assert sum("fenchel" in "".join(cell["source"]) for cell in cells) >= 4


# --- examples


def test_entmax_in_a_plain_gpt_learns_to_copy() -> None:
    assert script("examples/attend_in_a_gpt.py").main(steps=200) > 0.95


def test_score_trust_bounds_the_scores_of_adamw() -> None:
    results = script("examples/score_trust_around_adamw.py").main()
    (loss, score), (trusted_loss, trusted_score) = results.values()
    assert trusted_loss < loss
    assert trusted_score < 50 < score


def test_another_map_in_a_llama_changes_its_logits() -> None:
    pytest.importorskip("transformers")
    assert script("examples/attach_to_a_llama.py").main() > 1e-4


def test_a_certified_layer_has_its_bounds_in_order() -> None:
    at, lower, upper = script("examples/certify_a_layer.py").main()
    assert at <= lower * 1.01 <= upper


def test_a_server_answers_with_traces() -> None:
    pytest.importorskip("starlette")
    model = ROOT / "fenchel" / "lessons" / "model"
    tokens = script("examples/serve_with_traces.py").main(str(model))
    assert len(tokens) == 4


def test_every_example_has_a_test_and_a_row() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    tests = Path(__file__).read_text()
    readme = (ROOT / "examples" / "README.md").read_text()
    assert all(f"examples/{name}" in tests and f"examples/{name}" in readme for name in scripts)
    assert len(scripts) == 5


def test_every_benchmark_has_a_row() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__main__", "harness"}
    assert names == set(re.findall(r"`fenchel bench (\w+)", text)) - {"NAME"}
