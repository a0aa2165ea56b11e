"""The log of experiments: one file per entry in docs/log, and docs/log.md, their index.

    python docs/log.py

An entry that stands in docs/log.md itself, from a line ``## DATE · TITLE`` to the next, is moved to
a file of its own. The index is then written: question and answer of every entry, by day. The answer
is the first sentence below **Answer.**, else of its conclusion, of what was seen, of the entry.
"""

import re
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parent
INDEX, FOLDER = DOCS / "log.md", DOCS / "log"
HEADING = re.compile(r"^#{1,2} (\d{4}-\d\d-\d\d) · (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#|\.\./)")
ANSWERS = ("Answer", "Conclusion", "Result", "Seen", "Measured", "Found", "Done", "Tried")
HEAD = """# Log of experiments

What was asked and what came out; most answers are no. Each entry has the numbers, and how they
were measured. This page is written by `python docs/log.py`; a new entry is a file in `docs/log`, or
a section `## DATE · QUESTION` at the end of this page, which the script moves there.
"""
DAY = """
## {date}

| question | answer |
| --- | --- |
"""


def move_entries() -> None:
    """Give every entry of the index page a file of its own."""
    text = INDEX.read_text(encoding="utf-8")
    starts = [match.start() for match in HEADING.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        heading, _, body = text[start:end].partition("\n")
        date, title = HEADING.fullmatch(heading).groups()  # type: ignore[union-attr]
        slug = "-".join(re.findall(r"[a-z0-9]+", title.lower()))[:70].strip("-")
        body = re.sub(r"^#(#+ )", r"\1", LINK.sub("](../", body), flags=re.MULTILINE)
        content = f"# {date} · {title}\n\n{body.strip()}\n"
        (FOLDER / f"{date}-{slug}.md").write_text(content, encoding="utf-8")


def index() -> str:
    """The text of docs/log.md."""
    rows, date = [], ""
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        heading = HEADING.match(text)
        if heading is None:
            raise ValueError(f"{path} does not begin with a line '# DATE · QUESTION'.")
        if heading[1] != date:
            date = heading[1]
            rows.append(DAY.format(date=date))
        title = heading[2].replace("|", r"\|")
        rows.append(f"| [{title}](log/{path.name}) | {answer(text)} |\n")
    return HEAD + "".join(rows)


def answer(text: str) -> str:
    """The first sentence of the conclusion, in one line of at most 200 characters."""
    body = HEADING.sub("", text, count=1).strip()
    for word in ANSWERS:
        found = re.search(rf"^\*\*{word}[^*]*\*\*(?: \([^)]*\))?[.:]?", body, re.MULTILINE)
        if found:
            body = body[found.end() :].strip()
            break
    body = re.sub(r"^\*\*[^*]*\*\*", "", body).strip()
    paragraph = next(p for p in re.split(r"\n\s*\n|\n(?=\|)", body) if not p.startswith("|"))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    sentences = re.split(r"(?<=[a-z0-9)`%][.:]) (?=[A-Z`*0-9])", plain)
    few = 2 if len(sentences[0]) < 30 else 1
    sentence = " ".join(sentences[:few]).replace("|", r"\|")
    if len(sentence) > 200:
        sentence = sentence[:200].rsplit(" ", 1)[0] + " ..."
        sentence += "`" if sentence.count("`") % 2 else ""
    return sentence.strip()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    move_entries()
    INDEX.write_text(index(), encoding="utf-8")
