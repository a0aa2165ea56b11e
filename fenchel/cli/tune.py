"""fenchel tune: continue a checkpoint on a text, on documents or on conversations."""

from pathlib import Path
from typing import Any

from fenchel.cli.console import (
    CheckpointPath,
    Switch,
    Whole,
    require_inputs,
    settings_from,
    text_path,
)
from fenchel.cli.train import RunFlags
from fenchel.files import require_output


def run(
    directory: CheckpointPath | None = None,
    /,
    *,
    text: str | None = None,
    template: str | None = None,
    lora: Whole | None = None,
    alpha: float | None = None,
    targets: str | None = None,
    merge: Switch = False,
    epochs: float | None = None,
    kl: float | None = None,
    config: Path | None = None,
    export: Path | None = None,
    flags: RunFlags = RunFlags(),  # noqa: B008
) -> int:
    """Continue a checkpoint on a text and leave a run directory with a report.

    Documents are packed into rows and do not attend to one another. Of conversations only the
    answers of the assistant are learnt.

    Parameters
    ----------
    directory
        The checkpoint: a run directory, or a Hugging Face directory with safetensors and
        tokenizer.json.
    text
        A text file, a folder, "sotu" or "kjv", or a .jsonl file: one document ("text") or one
        conversation ("messages") per line.
    template
        The chat template for conversations: "plain", or a file with a jinja2 template; that of the
        checkpoint by default.
    lora
        Rank of LoRA adapters, which are trained instead of the weights. Short for tune.rank.
    alpha
        Factor of the adapters, times 1 / rank; twice the rank by default. Short for tune.alpha.
    targets
        The linear maps with adapters, such as q,v or qkv,out,gate,up,down; q,k,v,out by default.
        Short for tune.targets.
    merge
        With --lora and --export: merge the adapters into the weights.
    epochs
        Passes over the text, 3 by default, where neither --steps nor --budget is given. Short for
        tune.epochs.
    kl
        Keep the tuned model within this mean KL, in nats per token, of the checkpoint on held-out
        text. Short for tune.kl.
    config
        A TOML file of settings, without a section model.
    export
        When training has finished, write the model as this Hugging Face directory, or its adapters
        as a directory of PEFT.
    """
    lengths = {"--epochs": epochs, "--steps": flags.steps, "--budget": flags.budget}
    if len(given := [name for name, value in lengths.items() if value is not None]) > 1:
        raise ValueError(f"give {given[0]} or {given[1]}, not both.")
    short: dict[str, Any] = {
        "text.source": text,
        "tune.rank": lora,
        "tune.alpha": alpha,
        "tune.epochs": epochs,
        "tune.kl": kl,
        **flags.short(),
    }
    if targets is not None:
        short["tune.targets"] = [target.strip() for target in targets.split(",")]
    if merge and (export is None or (lora is None and flags.resume is None)):
        raise ValueError("--merge belongs to --lora and --export OUT.")
    mapping = settings_from(config, flags.set, short)
    if flags.resume is not None:
        fixed = {"DIR": directory, "--text": text, "--template": template, "--out": flags.out}
        if extra := [name for name, value in fixed.items() if value is not None]:
            raise ValueError(f"--resume continues a run as it is: no {extra[0]} with it.")
    elif directory is None:
        raise ValueError("name the checkpoint to tune: fenchel tune DIR --text FILE.")
    elif "source" not in mapping.get("text", {}):
        raise ValueError("name the text to tune on: --text FILE.")
    if flags.resume is None:
        require_inputs(directory)
    if export is not None:
        run_folder = flags.resume or flags.out or Path("runs", "new")
        source = mapping.get("text", {}).get("source")
        reads = [directory, run_folder, text_path(source)]
        reads += [] if template in (None, "plain") else [Path(str(template))]
        adapters = lora is not None and not merge
        files = () if directory is None or adapters else directory.glob("*.safetensors")
        size = sum(file.stat().st_size for file in files)
        require_output(export, folder=True, new=True, reads=reads, size=size)
    return flags.start(mapping, export=export, merge=merge, checkpoint=directory, template=template)
