"""A scene: a drawing with handles in a lesson, whose state arrives in Python.

    evenings = Scene("points_and_variety", {"T": 1.0, "C": 0.0}, rivals=rivals)  # a cell shows it
    evenings.state["T"]  # another cell follows it

``scenes/NAME.js`` draws with the functions of ``scene.js`` and ``maps.js``. It gets ``DATA``, the
values that the lesson computed, and ``DATA.state``, where the handles stand at first. The page is
one file that needs no server and no Python: nothing is loaded, and its policy admits only its own
script and style. A frame of marimo shows it, and the drawing never waits for Python: the script
sends the state to a hidden text field beside the frame (``share`` in scene.js), and the cells that
use ``state`` run again. The cell that makes a scene must not depend on it, or its frame would be
loaded anew under the reader's finger.

A scene names ``places``: parts of its state that occur together. The web edition stores what the
cells after the scene show at each of them, and there its handles snap to the nearest place, so that
picture and sentences agree; in ``fenchel learn`` they move freely. After a scene without places the
sentences of the web edition stay at its first state.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product
from string import Template
from typing import Any

import marimo as mo

from fenchel.report.html import data_block, policy, read_asset

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<noscript>This part of the page needs its script, and scripts are disabled.</noscript>
$body
<script type="application/json" id="data">$data</script>
<script>$script</script>
</body>
</html>
""")


def scene_page(name: str, state: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The page of a scene: one file that draws from ``data``, with its handles at ``state``."""
    script = "\n".join(
        [
            'const DATA = JSON.parse(document.getElementById("data").textContent);',
            read_asset(f"scenes/{name}.js", "fenchel.lessons"),
        ]
    )
    style = read_asset("scene.css", "fenchel.lessons")
    return frame_page(name, style=style, script=script, data={**data, "state": dict(state)})


def all_places(**values: Sequence[float | str]) -> list[dict[str, float | str]]:
    """The places at which each part of a state has one of its values, the last running fastest."""
    return [dict(zip(values, place, strict=True)) for place in product(*values.values())]


def frame_page(name: str, *, body: str = "", style: str, script: str, data: Any) -> str:
    """A page for a frame of a lesson, as high as its content; the script reads the data."""
    files = (read_asset(file, "fenchel.lessons") for file in ("maps.js", "scene.js"))
    script = "\n".join([*files, "fit();", script])
    style = read_asset("colours.css") + style
    return _PAGE.substitute(
        policy=policy(script=script, style=style),
        title=escape(name.replace("_", " ")),
        style=style,
        script=script,
        body=body,
        data=data_block(data),
    )


class Scene(mo.ui.text):
    """A scene by the name of its script, with its first state and the values that it draws."""

    def __init__(
        self,
        name: str,
        state: Mapping[str, float | str],
        *,
        places: Sequence[Mapping[str, float | str]] | None = None,
        **data: Any,
    ) -> None:
        self.places = places
        """Where the handles stand in the web edition, the other parts being constant."""
        self.page = scene_page(name, state, data)
        """The page in one file."""
        self.snapping = scene_page(name, state, {**data, "places": places}) if places else self.page
        """The page whose handles stand at the places only."""
        self._frame = mo.iframe(self.page)
        super().__init__(json.dumps(dict(state)))

    @property
    def text(self) -> str:
        """The frame, and beside it the field that takes the state."""
        field = f'<div style="display:none">{super().text}</div>'
        return f'<div class="lesson-scene">{field}{self._frame.text}</div>'

    @property
    def state(self) -> dict[str, Any]:
        """Where the handles stand."""
        state: dict[str, Any] = json.loads(self.value)
        return state
