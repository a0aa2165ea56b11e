"""fenchel/train/step.py: deterministic kernels, where a device has others."""

import pytest
import torch

from fenchel.train.step import deterministic

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _workspace_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


@pytest.mark.parametrize(("device", "enabled", "fixed"), [(CPU, True, False), (GPU, False, False)])
def test_a_cpu_and_a_disabled_context_change_nothing(
    device: torch.device, enabled: bool, fixed: bool
) -> None:
    with deterministic(device, enabled=enabled):
        assert torch.are_deterministic_algorithms_enabled() == fixed


def test_a_gpu_uses_a_fixed_order_inside_the_context_only() -> None:
    with deterministic(GPU, enabled=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_kernel_names_the_setting() -> None:
    message = r"^cumsum does not; allow .* train\.deterministic=false\.$"
    with pytest.raises(ValueError, match=message), deterministic(GPU, enabled=True):
        raise RuntimeError("cumsum does not. It has no deterministic implementation.")
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_are_not_caught() -> None:
    with pytest.raises(RuntimeError, match="no memory"), deterministic(GPU, enabled=True):
        raise RuntimeError("no memory")
