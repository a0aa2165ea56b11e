"""Every module has a test that can be found by its name.

The tests of fenchel/a/b.py are tests/a/test_b.py or tests/a/test_b_<aspect>.py. A module without
such a file is tested together with others, by a contract or through a command: its test stands in
``ELSEWHERE``.
"""

from pathlib import Path

import pytest

import fenchel

PACKAGE, TESTS = Path(fenchel.__file__).parent, Path(__file__).parent

ELSEWHERE = {
    "attention/entmax_triton": "kernels/test_entmax_attention.py",
    "attention/reference": "attention/test_contract.py",
    "attention/sdpa": "attention/test_contract.py",
    "attention/shapes": "attention/test_attend.py",
    "checkpoints/weights": "model/families/test_published.py",
    "cli/bench": "cli/test_main.py",
    "cli/doctor": "cli/test_reading_commands.py",
    "cli/inspection_tables": "cli/test_inspect.py",
    "cli/reference": "cli/test_main.py",
    "cli/learn": "lessons/test_server.py",
    "cli/report": "cli/test_reading_commands.py",
    "data/sandbox": "data/test_tokenizer_file.py",
    "generation/conversation": "cli/test_chat.py",
    "generation/plain_decoder": "generation/test_cpu_step.py",
    "generation/steps": "generation/test_decoder.py",
    "hf/verification": "hf/test_adapter_attach.py",
    "inspection/recorder": "inspection/test_foreign_model.py",
    "inspection_result": "inspection/test_run.py",
    "inspection/trace": "inspection/test_foreign_model.py",
    "interpretability/hooked_model": "interpretability/test_intervention.py",
    "kernels/band": "attention/test_prior.py",
    "kernels/primitives": "kernels/test_decode_attention.py",
    "lessons": "lessons/test_notebooks.py",
    "model/families": "model/families/test_contract.py",
    "model/forward_context": "model/test_attention.py",
    "optim/score/descent": "optim/score/test_control.py",
    "optim/score/step_size": "optim/score/test_score_change.py",
    "optim/score/trust": "optim/score/test_control.py",
    "pipeline/run": "cli/test_train.py",
    "pipeline/task": "pipeline/test_preparation.py",
    "report/certificates": "cli/test_certify.py",
    "report/heat_map": "report/test_inspection_page.py",
    "report/reliability": "cli/test_eval.py",
    "sensitivity/perturbation": "sensitivity/test_attention_ball.py",
    "sensitivity/bounds/covariance": "sensitivity/test_bounds_attention.py",
    "sensitivity/bounds/feedforward": "sensitivity/test_bounds_layers.py",
    "sensitivity/weight_blocks": "sensitivity/test_attention_jacobian.py",
    "server/embeddings": "server/test_app.py",
    "server/metrics": "server/test_app.py",
    "kernels/sink_factor": "attention/test_sink.py",
}
"""A module, or a package of modules that one contract tests, to its test."""

MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix()
    for path in PACKAGE.rglob("*.py")
    if not path.stem.startswith("__")
}


def named_tests(module: str) -> list[Path]:
    """Test files named after a module, in the folder of its package or of the parent package."""
    folder, stem = Path(module).parent, Path(module).name
    names = {f"{folder.name}_{stem}", stem} if len(folder.parts) > 1 else {stem}
    folders = {folder, folder.parent} if len(folder.parts) > 1 else {folder}
    return [
        path
        for place in folders
        for name in names
        for pattern in (f"test_{name}.py", f"test_{name}_*.py")
        for path in (TESTS / place).glob(pattern)
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_has_a_test_of_its_name_or_a_row_in_the_table(module: str) -> None:
    rows = [row for row in ELSEWHERE if module == row or module.startswith(f"{row}/")]
    assert named_tests(module) or rows, f"add tests/{module} as test_*.py, or a row to ELSEWHERE"


@pytest.mark.parametrize("row", ELSEWHERE)
def test_a_row_of_the_table_is_needed_and_true(row: str) -> None:
    assert (TESTS / ELSEWHERE[row]).is_file()
    modules = [module for module in MODULES if module == row or module.startswith(f"{row}/")]
    assert modules, f"there is no module {row}"
    assert not named_tests(row), f"{row} has a test of its name; remove the row"
