"""The whole flow: settings in, run directory out.

    text -> tokens -> batches -> model -> loss -> optimiser -> run directory -> report

Each stage is a package; here they are handed to one another and nothing else happens.
``begin`` starts a run, ``resume`` goes on with one (run.py), and both end in ``train_and_report``.
"""

from fenchel.pipeline.config import RunCallback, RunConfig, fresh_path, settings
from fenchel.pipeline.preparation import open_corpus, speed
from fenchel.pipeline.run import baselines, begin, resume

__all__ = [
    "RunCallback",
    "RunConfig",
    "baselines",
    "begin",
    "fresh_path",
    "open_corpus",
    "resume",
    "settings",
    "speed",
]
