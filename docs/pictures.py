"""The pictures of docs/images: the commands that make their pages, and a browser that takes them.

    make pictures

The model is the one that the lessons come with. The report is that of the default run in runs/demo,
which is trained if it is not there. The moving picture types a sentence into the page of the whole
model, one word per frame, and then exchanges the map.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from fenchel.lessons.model_page import model_page, page_links
from fenchel.lessons.notebooks.softmax import points_and_variety
from tests.browser import DESKTOP, Browser

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MODEL = str(ROOT / "fenchel" / "lessons" / "model")
PAGES = {
    "inspect.png": (["inspect", MODEL, "--text", "sotu", "--max-tokens", "64"], "inspect.html"),
    "lens.png": (["lens", MODEL, "--text", "sotu", "--max-tokens", "40"], "lens.html"),
}
"""Picture: the command, whose flag --out names the page."""
SENTENCE = "The ships and the sailors need the Secretary of the"
MAPS = (2, 3)
"""Buttons of the model page that are pressed after the sentence: entmax, sparsemax."""
FRAME, LAST_FRAME = 450, 2000
"""How long a word and how long a map is shown, in milliseconds."""


def main() -> None:
    """Write every page into a temporary folder and photograph it."""
    browser = Browser()
    with tempfile.TemporaryDirectory() as folder:
        for picture, (command, name) in PAGES.items():
            page = Path(folder) / name
            run_command(*command, "--out", str(page))
            browser.open(page)
            save([screenshot(browser)], picture)
        page = Path(folder) / "scene.html"
        scene = points_and_variety.run()[1]["evenings"]
        page.write_text(scene.page, encoding="utf-8")
        browser.open(page)
        save([screenshot(browser)], "course_softmax.png")
        page = Path(folder) / "model.html"
        page.write_text(model_page(page_links(All_lessons="index.html")), encoding="utf-8")
        film(browser, page, "model.webp")
    run = ROOT / "runs" / "demo"
    if not run.exists():
        run_command("train", "--out", str(run))
    browser.open(run / "report.html")
    save([screenshot(browser)], "report.png")
    browser.driver.quit()


def run_command(*words: str) -> None:
    """Run ``fenchel`` as a user would, without what it prints."""
    command = [sys.executable, "-m", "fenchel", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def screenshot(browser: Browser) -> Image.Image:
    """The top of the page, without the empty space below a short one."""
    image = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    height = browser.run("return Math.ceil(document.body.getBoundingClientRect().bottom)")
    return image.crop((0, 0, image.width, min(image.height, height)))


def film(browser: Browser, page: Path, picture: str) -> None:
    """The whole model while somebody types, then with other maps."""
    browser.open(page, width=DESKTOP)
    browser.until(lambda: browser.text("#check") != "Comparing with the library.")
    frames, durations = [], []
    words = SENTENCE.split(" ")
    for count in range(1, len(words) + 1):
        browser.run(
            "const field = document.getElementById('text'); field.value = arguments[0];"
            "field.dispatchEvent(new Event('input', { bubbles: true }))",
            " ".join(words[:count]),
        )
        browser.until(lambda end=words[count - 1]: end.endswith(browser.text("#after").strip("“”")))
        frames.append(screenshot(browser))
        durations.append(FRAME)
    durations[-1] = LAST_FRAME
    for button in MAPS:
        browser.find(f"#map label:nth-of-type({button})").click()
        frames.append(screenshot(browser))
        durations.append(LAST_FRAME)
    save(frames, picture, durations)


def save(frames: list[Image.Image], picture: str, durations: list[int] | None = None) -> None:
    """One picture, or a moving one with a duration per frame in milliseconds."""
    moving = {"save_all": True, "append_images": frames[1:], "duration": durations, "loop": 0}
    frames[0].save(IMAGES / picture, quality=70, method=6, **(moving if durations else {}))
    print((IMAGES / picture).relative_to(ROOT))


if __name__ == "__main__":
    main()
