"""fenchel/train/step.py: deterministic kernels, where a device has others."""

import pytest
import torch

from fenchel.train.step import deterministic

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _workspace_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


@pytest.mark.parametrize(("device", "exact", "fixed"), [(CPU, True, False), (GPU, False, False)])
def test_a_cpu_and_a_gpu_that_need_not_repeat_are_left_as_they_are(
    device: torch.device, exact: bool, fixed: bool
) -> None:
    with deterministic(device, exact=exact):
        assert torch.are_deterministic_algorithms_enabled() == fixed


def test_a_gpu_is_asked_for_a_fixed_order_and_only_inside() -> None:
    with deterministic(GPU, exact=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_kernel_that_cannot_repeat_is_one_sentence_with_a_way_out() -> None:
    says = r"^cumsum does not; give up .* train\.exact=false\.$"
    with pytest.raises(ValueError, match=says), deterministic(GPU, exact=True):
        raise RuntimeError("cumsum does not. It has no deterministic implementation.")
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_troubles_pass() -> None:
    with pytest.raises(RuntimeError, match="no memory"), deterministic(GPU, exact=True):
        raise RuntimeError("no memory")
