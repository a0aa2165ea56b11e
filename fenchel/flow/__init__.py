"""The whole flow: settings in, run directory out.

    text -> tokens -> batches -> model -> loss -> optimiser -> run directory -> report

Each stage is a package; here they are handed to one another and nothing else happens.
``begin`` starts a run, ``resume`` goes on with one (run.py), and both end in ``carry_out``.
"""

from fenchel.flow.carry_out import baselines
from fenchel.flow.config import RunConfig, Watch, fresh_path, settings
from fenchel.flow.run import begin, resume
from fenchel.flow.text import open_corpus
from fenchel.flow.trial import speed

__all__ = [
    "RunConfig",
    "Watch",
    "baselines",
    "begin",
    "fresh_path",
    "open_corpus",
    "resume",
    "settings",
    "speed",
]
