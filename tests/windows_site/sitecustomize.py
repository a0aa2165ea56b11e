"""Loaded by every Python process that a test under ``-p tests.windows`` starts."""

from tests.windows import install

if __name__ == "sitecustomize":  # not when pytest looks here for doctests
    install()
