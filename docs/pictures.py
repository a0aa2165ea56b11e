"""The pictures of docs/images: the commands that make their pages, and a browser that takes them.

    make pictures

The model is the one that the lessons come with. The report is that of the default run in runs/demo,
which is trained if it is not there.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MODEL = str(ROOT / "fenchel" / "lessons" / "model")
PAGES = {
    "inspect.png": (["inspect", MODEL, "--text", "sotu", "--max-tokens", "64"], "inspect.html"),
    "lens.png": (["lens", MODEL, "--text", "sotu", "--max-tokens", "40"], "lens.html"),
}
"""Picture: the command, whose flag --out names the page."""
SIZE = "1280,900"


def main() -> None:
    """Write every page into a temporary folder and photograph it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("docs/pictures.py needs Chromium.")
    with tempfile.TemporaryDirectory() as folder:
        for picture, (command, name) in PAGES.items():
            page = Path(folder) / name
            fenchel = [sys.executable, "-m", "fenchel", *command, "--out", str(page)]
            subprocess.run(fenchel, check=True, stdout=subprocess.DEVNULL)
            photograph(browser, page, IMAGES / picture)
        run = ROOT / "runs" / "demo"
        if not run.exists():
            train = [sys.executable, "-m", "fenchel", "train", "--out", str(run)]
            subprocess.run(train, check=True)
        photograph(browser, run / "report.html", IMAGES / "report.png")


def photograph(browser: str, page: Path, picture: Path) -> None:
    """The top of a page, as it is shown on a wide window."""
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
    flags += ["--virtual-time-budget=4000", f"--screenshot={picture}"]
    subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)
    print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main()
