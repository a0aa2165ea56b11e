"""MPS: chosen after CUDA, without float64; what needs float64 goes to the CPU or is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fenchel.choice import Entmax, Softmax
from fenchel.cli import main
from fenchel.evaluate import score
from fenchel.evaluate.calibration import fit_temperature, reliability
from fenchel.generation import generate
from fenchel.generation.steering import within_budget
from fenchel.model import ModelConfig, Transformer
from fenchel.model.rotary_table import sinusoids
from fenchel.train import select_device
from tests.mps import OnMPS, simulated_mps


def test_auto_prefers_cuda_then_mps_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device().type == "cpu"
    with simulated_mps():
        assert select_device().type == select_device("mps").type == "mps"
        assert select_device(float64=True).type == "cpu"
        with pytest.raises(ValueError, match=r"^mps has no float64, in which .*; give cpu\.$"):
            select_device("mps", float64=True)
        with pytest.raises(ValueError, match=r"there is no device 'cuda:7' here; give mps or cpu"):
            select_device("cuda:7")
    with pytest.raises(ValueError, match="there is no device 'mps' here; give cpu"):
        select_device("mps")


def test_the_simulated_device_has_no_float64_and_keeps_its_tensors_apart() -> None:
    with simulated_mps(), torch.no_grad():
        x = torch.ones(3, device="mps")
        assert x.device == (x + 1).device == torch.zeros(2).to("mps").device == torch.device("mps")
        assert x.cpu().device.type == "cpu"
        for wide in (x.double, lambda: x.to(torch.float64), lambda: x.sum(dtype=torch.float64)):
            with pytest.raises(TypeError, match="float64"):
                wide()
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(2, dtype=torch.float64, device="mps")
        with pytest.raises(RuntimeError, match="one on cpu"):
            x + torch.ones(3)


@pytest.mark.parametrize("choice", ["softmax", "entmax"])
def test_a_model_on_mps_generates_and_is_scored_as_on_the_cpu(choice: str) -> None:
    config = ModelConfig(vocabulary=40, context=16, width=16, layers=2, heads=2, choice=choice)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    ids, text = torch.arange(5)[None], np.arange(40)

    def both(device: str) -> tuple[list[list[int]], float]:
        there = model.to(device)
        drawn = generate(
            there,
            ids.to(device),
            max_new_tokens=6,
            top_p=0.9,
            generator=torch.Generator().manual_seed(1),
        )
        return drawn.tolist(), score(there, text, bytes=100, context=16).loss

    expected = both("cpu")
    with simulated_mps(), torch.no_grad():
        assert both("mps") == expected
        assert all(isinstance(weight, OnMPS) for weight in model.parameters())


MEASURES = {
    "sensitivity": lambda z: Softmax().sensitivity(z.softmax(-1)),
    "bounds": lambda z: torch.stack(Entmax(1.5).sensitivity_bounds(z.softmax(-1))),
    "temperature": lambda z: torch.tensor(fit_temperature(z, z.argmin(-1) % 3).loss),
    "bins": lambda z: torch.tensor(reliability(z.softmax(-1).amax(-1), z[:, 0] > 0)),
    "budget": lambda z: within_budget(z, torch.zeros_like(z), torch.ones_like(z[:, 0]) * 0.1),
    "positions": lambda z: sinusoids(torch.arange(4, device=z.device), 6),
}
"""What is computed in float64 of tensors on any device."""


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_computed_in_float64_takes_tensors_of_mps(name: str) -> None:
    z = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    expected = MEASURES[name](z)
    with simulated_mps(), torch.no_grad():
        assert torch.equal(MEASURES[name](z.to("mps")).cpu(), expected)


@pytest.mark.parametrize("optimiser", ["adamw", "score"])
def test_a_run_on_mps_trains_and_ends_with_its_report(optimiser: str, tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the people of these States have peace and trade. " * 400)
    sizes = f"text.vocabulary=300 model.context=16 model.width=16 optim.optimiser={optimiser}"
    sets = [word for size in sizes.split() for word in ("--set", size)]
    command = ["train", "--text", str(text), "--steps", "3", "--out", str(run), *sets]
    with simulated_mps():
        assert main([*command, "--set", "train.device=mps"]) == 0
    assert (run / "report.html").exists()
