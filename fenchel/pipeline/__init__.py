"""A run from settings to report.

    text -> tokens -> batches -> model -> loss -> optimiser -> run directory -> report

Each stage is a package; this one passes the result of each to the next. ``begin`` starts a run,
``tune`` one from a checkpoint, and ``resume`` continues either (run.py). What differs between
training and tuning is a ``Task`` (task.py, tuning.py). A run builds one model, which first serves
to time a few steps (preparation.py).
"""

from fenchel.pipeline.config import RunCallback, RunConfig, new_run_path, settings
from fenchel.pipeline.preparation import open_corpus, speed
from fenchel.pipeline.presets import PRESETS
from fenchel.pipeline.run import (
    baselines,
    begin,
    own_text,
    prediction_map,
    resume,
    start_run,
    tune,
)

__all__ = [
    "PRESETS",
    "RunCallback",
    "RunConfig",
    "baselines",
    "begin",
    "new_run_path",
    "open_corpus",
    "own_text",
    "prediction_map",
    "resume",
    "settings",
    "speed",
    "start_run",
    "tune",
]
