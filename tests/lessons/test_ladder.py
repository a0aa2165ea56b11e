"""Questions, recap cards and the page of what was mastered, in the pages of the web edition."""

from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from fenchel.lessons.course import COURSE, Record
from fenchel.lessons.ladder import STEPS, ladder_html, mastery_html, recap_html
from fenchel.lessons.web_edition import html_page, progress_page
from fenchel.report.html import element
from tests.browser import PHONE, Browser, needs_browser

NAME = "sparse_choice"
PLACE = [each.name for each in COURSE].index(NAME)


def test_every_sentence_is_in_the_markup_and_hidden_until_its_time() -> None:
    html = ladder_html(NAME)
    assert "The answer: 0.75." in html
    assert html.index("The answer: 0.75.") > html.index('class="why" hidden')
    assert "<math" in html
    assert "style=" not in html, "the policy of a frame forbids it"
    assert ladder_html("a lesson without questions") == ""


def test_a_page_has_the_cards_of_all_lessons_before_it() -> None:
    html = recap_html(NAME)
    assert html.count('class="card"') == 3 * (PLACE + 1)
    assert recap_html(COURSE[0].name).count('class="card"') == 3


def test_the_steps_are_those_of_a_record() -> None:
    assert tuple(STEPS) == tuple(Record().steps)
    assert mastery_html(lambda each: each.name).count("data-done=") == len(STEPS) * len(COURSE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages with the parts alone: a lesson takes seconds to compute."""
    folder = tmp_path_factory.mktemp("ladder")
    body = element("main", ladder_html(NAME), recap_html(NAME))
    data: dict[str, Any] = {"name": NAME, "controls": {}, "cells": {}}
    (folder / "lesson.html").write_text(html_page("lesson", body, data, []))
    (folder / "progress.html").write_text(progress_page(lambda each: each.name, "index.html"))
    return folder


class LadderBrowser(Browser):
    """Opens a page and waits until it shows what was stored."""

    def open(self, page: Path | str, **how: Any) -> None:
        super().open(page, **how)
        self.until(lambda: self.run("return document.documentElement.dataset.progress"))


@pytest.fixture(scope="module")
def session() -> Iterator[Browser]:
    session = LadderBrowser()
    yield session
    session.driver.quit()


@pytest.fixture
def browser(session: Browser, folder: Path) -> Browser:
    session.open(folder / "lesson.html")
    change(session, "lessons.clear()")
    session.open(folder / "lesson.html")
    return session


def change(browser: Browser, script: str, *arguments: Any) -> None:
    """Change the records that pages of files keep, by a script with their object store."""
    browser.driver.execute_async_script(
        f"""
        const [done, ...given] = [...arguments].reverse(), opening = indexedDB.open("fenchel", 1);
        opening.onsuccess = () => {{
            const change = opening.result.transaction("lessons", "readwrite");
            const lessons = change.objectStore("lessons");
            {script};
            change.oncomplete = () => done();
        }};
        """,
        *arguments,
    )


def put(browser: Browser, name: str, record: Any) -> None:
    change(browser, "lessons.put(given[1], given[0])", record, name)


def write(browser: Browser, text: str, said: str) -> None:
    """Answer by pencil, and wait for what is said to it."""
    field = browser.find("[data-step=pencil] input")
    browser.run("document.querySelector('[data-step=pencil] .said').textContent = ''")
    field.clear()
    field.send_keys(text, Keys.ENTER)
    browser.until(lambda: browser.text("[data-step=pencil] .said").startswith(said))


@needs_browser
@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (text, "Right.")
            for text in ("0.75", ".75", "0,75", "3/4", "75 %", " +7.5e-1 ", "0.7501")
        ),
        *(
            (text, "Write a number")
            for text in ("", "three quarters", "1/0", "--1", "1/2/3", "0x1")
        ),
        *((text, "Not yet.") for text in ("0.7", "-0.75", "−3/4", "1,000", "75")),
    ],
)
def test_a_number_is_read_as_people_write_it(browser: Browser, text: str, said: str) -> None:
    write(browser, text, said)
    assert browser.console() == []


@needs_browser
def test_hints_come_in_steps_and_the_answer_after_two_tries(browser: Browser) -> None:
    why = browser.find("[data-step=pencil] .why")
    reveal = browser.find("[data-step=pencil] .reveal")
    hint = browser.find("[data-step=pencil] .hint")
    assert "That is the threshold" not in browser.text("[data-step=pencil]")
    write(browser, "1.25", "Not yet.")
    assert browser.text("[data-step=pencil] .said") == "Not yet."
    assert "That is the threshold" in browser.text("[data-step=pencil]"), "a slip has its sentence"
    assert not reveal.is_displayed()
    hint.click()
    browser.until(lambda: "only the first two" in browser.text("[data-step=pencil] .hints"))
    browser.expect(lambda: hint.text, "A hint (2 of 2)")
    hint.click()
    browser.until(lambda: not hint.is_displayed())
    write(browser, "words", "Write a number")
    assert not reveal.is_displayed(), "what is no number is no try"
    write(browser, "0.1", "Not yet.")
    assert "That is the threshold" not in browser.text("[data-step=pencil]")
    reveal.click()
    browser.until(lambda: "The answer: 0.75." in why.text)
    write(browser, "0.75", "Right.")


@needs_browser
def test_a_choice_is_explained_and_everything_is_kept(browser: Browser, folder: Path) -> None:
    check = browser.find("[data-step=choice] .check")
    said = lambda: browser.text("[data-step=choice] .said")  # noqa: E731
    check.click()
    browser.expect(said, "Choose an answer first.")
    options = "document.querySelectorAll('[data-step=choice] input')"
    browser.run(f"{options}[2].click()")
    check.click()
    browser.expect(said, "Not yet. Try once more.")
    browser.run(f"{options}[0].click()")
    check.click()
    browser.until(lambda: "With" in browser.text("[data-step=choice] .why"))
    write(browser, "0.75", "Right.")
    browser.open(folder / "lesson.html")
    assert browser.find("[data-step=pencil] input").get_attribute("value") == "0.75"
    assert browser.run(f"return {options}[0].checked")
    assert said() == "Right."
    browser.open(folder / "progress.html")
    assert "0 predictions, 1 question by pencil, 1 by choice" in browser.text(".count")
    marks = "return document.querySelectorAll('[data-lesson=sparse_choice] .yes').length"
    assert browser.run(marks) == 2


def shown(browser: Browser) -> list[str]:
    script = (
        "return Array.from(document.querySelectorAll('.earlier .card:not([hidden])'),"
        " (e) => `${e.dataset.lesson} ${e.dataset.card}`)"
    )
    return list(browser.run(script))


@needs_browser
def test_cards_come_back_after_one_three_and_seven_lessons_or_when_due(
    browser: Browser, folder: Path
) -> None:
    assert shown(browser) == [], "nothing of lessons that were not opened"
    for each in COURSE[:PLACE]:
        put(browser, each.name, {"opened": True})
    browser.open(folder / "lesson.html")
    back = [COURSE[PLACE - distance].name for distance in (1, 3, 7)]
    nearest = [f"{name} {i}" for name in (back[1], back[0]) for i in range(3)]
    assert shown(browser) == nearest, "six at most, those of the nearest lessons"
    today, later = date.today().isoformat(), (date.today() + timedelta(5)).isoformat()
    known = {str(i): {"box": 2, "due": later} for i in range(3)}
    for name in back:
        put(browser, name, {"opened": True, "cards": known})
    weak = COURSE[PLACE - 2].name
    put(browser, weak, {"opened": True, "cards": {"1": {"box": 0, "due": today}}})
    browser.open(folder / "lesson.html")
    assert shown(browser) == [f"{weak} 1"]


@needs_browser
def test_a_card_that_is_known_waits_longer_and_a_weak_one_is_listed(
    browser: Browser, folder: Path
) -> None:
    put(browser, NAME, {"cards": {"0": {"box": 2, "due": "2020-01-01"}}})
    browser.open(folder / "lesson.html")

    def answer(number: int, known: str) -> str:
        card = f".recap > [data-card='{number}']"
        back = browser.find(f"{card} .back")
        assert not back.is_displayed()
        browser.run("arguments[0].click()", browser.find(f"{card} .turn"))
        browser.until(back.is_displayed)
        browser.run("arguments[0].click()", browser.find(f"{card} [data-known={known}]"))
        return browser.until(lambda: browser.text(f"{card} .said"))

    assert answer(0, "yes") == "It comes back after 7 days."
    assert answer(1, "yes") == "It comes back after 1 day."
    assert answer(2, "no") == "It comes back at the end of the next lesson."
    browser.open(folder / "progress.html")
    assert "Can a map with exact zeros be trained" in browser.text(".weak")
    assert "What is sparsemax" not in browser.text(".weak")
    assert browser.text(f"[data-lesson={NAME}] .known") == "2 of 3"
    assert "0 lessons mastered" in browser.text(".sum")


@needs_browser
def test_every_page_of_files_finds_what_the_one_before_it_stored(
    browser: Browser, folder: Path
) -> None:
    """With localStorage Chromium loses about half of these."""
    for tries in range(20):
        write(browser, f"0.{tries}", "Not yet.")
        browser.open(folder / ("progress.html" if tries % 2 else "lesson.html"))
        browser.open(folder / "lesson.html")
        assert browser.find("[data-step=pencil] input").get_attribute("value") == f"0.{tries}"


@needs_browser
def test_the_last_page_says_what_was_mastered(browser: Browser, folder: Path) -> None:
    cards = {str(i): {"box": 1, "due": "2020-01-01"} for i in range(3)}
    done = {"pencil_right": True, "choice_right": True, "cards": cards}
    put(browser, "slopes", done)
    put(browser, "softmax", {"pencil_tries": 3, "pencil": "3"})
    browser.open(folder / "progress.html")
    assert browser.text(".sum").startswith(f"1 lesson mastered of {len(COURSE)}")
    assert "Two scores are" in browser.text(".missed-questions")
    assert browser.text(".missed-questions").count("by pencil") == 1
    for each in COURSE:
        put(browser, each.name, done)
    browser.open(folder / "progress.html", width=PHONE, scheme="dark")
    assert browser.text(".sum") == "You have mastered the whole course."
    assert not browser.find(".weak").is_displayed()
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE
    assert browser.console() == []


@needs_browser
@pytest.mark.parametrize(
    "damaged",
    [
        7,
        None,
        "text",
        [],
        {"cards": 3, "pencil": 7},
        {"cards": {"0": {"box": "x"}}},
    ],
)
def test_damaged_storage_loses_nothing_else(browser: Browser, folder: Path, damaged: Any) -> None:
    put(browser, NAME, damaged)
    put(browser, "slopes", {"solved": True, "code": "mine"})
    browser.open(folder / "lesson.html")
    write(browser, "0.75", "Right.")
    browser.open(folder / "progress.html")
    assert f"1 of {len(COURSE)} exercises solved" in browser.text(".count")
    assert "1 question by pencil" in browser.text(".count")
    assert browser.console() == []
