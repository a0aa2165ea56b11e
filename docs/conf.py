"""Settings of Sphinx for the pages of docs/site.py. The site needs nothing from outside."""

import fenchel

project = "fenchel"
author = "The fenchel authors"
copyright = author
release = version = fenchel.__version__
extensions = ["myst_parser"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"fenchel {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "monokai"
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
