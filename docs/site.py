"""The pages of the site, written into a folder that Sphinx then builds (``make docs``).

    python docs/site.py SOURCE            every page as Markdown, and the pictures they show

The front page is README.md; CONTRIBUTING.md, CHANGELOG.md and their like are pages too. The command
line describes its commands, and every package with public names gets a page of its docstrings.
LaTeX becomes MathML, which browsers draw without a script. Sphinx gets plain pages and needs no
plug-in but its reader of Markdown, so that another generator could take its place.
"""

import ast
import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import latex2mathml.converter

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "RELEASE.md": "release.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the repository outside docs, and their names in the site."""
NAVIGATION = {
    "Begin": "gallery choosing cookbook examples lessons",
    "Guides": "inspect lens certify attach tune checkpoints distributed calibration generate chat "
    "steer serve optimisers",
    "Reference": "commands settings quick_reference attentions glossary pitfalls errata reading",
    "Mathematics": "notation maths/choice maths/attention maths/sensitivity maths/model "
    "maths/generation maths/optimisers maths/score_descent",
    "Python": "API",
    "Development": "contributing architecture benchmarks log changelog release security "
    "code_of_conduct",
}
"""Sections of the sidebar, and their pages in order; API stands for those of the packages."""
ENTRY = "---\norphan: true\nnosearch: true\n---\n\n"
"""Above an entry of the log: its index leads to it, and the search leaves it out."""
COURSE = """

<p><a href="course/index.html">Open the course here</a>: it needs no installation.</p>
"""
"""Below the heading of the page of the lessons, where the site has the web edition inside."""
LINKED = ("glossary", "quick_reference", "pitfalls")
OPENED = re.compile(r"`fenchel learn (\w+)`")
OPENS = r'<a href="course/\1.html"><code>fenchel learn \1</code></a>'
"""There the commands of these pages open the lessons."""
VERSIONS = """

<p>These pages are of the newest state. Releases: {links}.</p>
"""
"""Below the heading of the front page, where the site has those of releases inside."""
CODE = re.compile(r"(^```.*?^```$|``[^\n]*?``|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\\w])\$(?!\s)([^$\n]+?(?:\n[^$\n]+?)?)(?<!\s)\$(?!\d)", re.DOTALL
)
FUNCTION = (
    (r"(?<=[\w)}])\s*\\(log|exp)\b", r"\\, \\\1"),
    (r"\\(log|exp)\s*(?=[^\W_]|\\[a-zA-Z](?!ig|eft))", r"\\\1\\, "),
)
"""The thin spaces that TeX leaves around a function, which MathML lacks."""
LONG = 40
"""Characters of LaTeX from which on a formula within a line may be wider than a phone."""
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def write(source: Path) -> None:
    """Every page and every picture, into ``source``."""
    shutil.rmtree(source, ignore_errors=True)
    pages = {path.relative_to(ROOT).as_posix(): path for path in DOCS.rglob("*.md")}
    pages |= {name: ROOT / name for name in MOVED if (ROOT / name).exists()}
    for name, path in pages.items():
        text = relocate(path.read_text(encoding="utf-8"), path.parent, place(name), source)
        save(source / place(name), (ENTRY if name.startswith("docs/log/") else "") + formulas(text))
    if os.environ.get("COURSE"):
        lessons = source / "lessons.md"
        lessons.write_text(lessons.read_text(encoding="utf-8").replace("\n", COURSE, 1), "utf-8")
        for name in LINKED:
            page = source / f"{name}.md"
            page.write_text(OPENED.sub(OPENS, page.read_text(encoding="utf-8")), "utf-8")
    save(source / "commands.md", commands())
    for package in packages():
        save(source / f"api/{package}.md", api(package))
    front = source / "index.md"
    text = front.read_text(encoding="utf-8")
    if releases := os.environ.get("RELEASES", "").split():
        links = ", ".join(f'<a href="{name}/index.html">{name}</a>' for name in releases)
        text = text.replace("\n", VERSIONS.format(links=links), 1)
    front.write_text(text + sidebar(), encoding="utf-8")


def save(path: Path, text: str) -> None:
    """Write a page, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def place(name: str) -> str:
    """Where a page of the repository is in the site."""
    return MOVED.get(name) or name.removeprefix("docs/")


def sidebar() -> str:
    """The navigation, as the hidden tables of contents that Sphinx reads from its front page."""
    parts = []
    for section, names in NAVIGATION.items():
        entries = [f"api/{name}" for name in packages()] if names == "API" else names.split()
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n" + "\n".join(entries))
    return "\n```\n".join(parts) + "\n```\n"


# --- links and pictures


def relocate(text: str, folder: Path, page: str, source: Path) -> str:
    """Links of a page, as they are in the site; pictures are copied beside it."""

    def moved(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if not target.is_relative_to(ROOT):
            return link[0]
        name = target.relative_to(ROOT).as_posix()
        if target.suffix in {".png", ".svg", ".gif", ".webp"}:
            copied = source / "pictures" / target.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copied)
            return f"]({upwards(page)}pictures/{target.name})"
        if target.suffix != ".md" or target.is_dir():
            return f"]<{name}>"  # a file of the repository
        return f"]({upwards(page)}{place(name)}{link[2] or ''})"

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    text = "".join(parts)
    return re.sub(r"\[([^\]]*)\]<([^>]*)>", r"\1 (`\2`)", text)


def upwards(page: str) -> str:
    """From the folder of a page to that of all pages."""
    return "../" * page.count("/")


# --- formulas


def formulas(text: str) -> str:
    """LaTeX outside code as MathML."""
    parts = CODE.split(text)
    parts[::2] = [FORMULA.sub(mathml, part) for part in parts[::2]]
    return "".join(parts)


def mathml(formula: re.Match[str]) -> str:
    """One formula, inline or on a line of its own, where parts apart may go below one another."""
    latex = " ".join((formula[1] or formula[2]).split())
    latex = latex.replace(r"\arg", r"\operatorname{arg}").replace(r"\|", r"\Vert ")
    for before, behind in FUNCTION:  # p log p, which is else drawn plogp
        latex = re.sub(before, behind, latex)
    if not formula[1]:
        drawn = latex2mathml.converter.convert(latex)
        return drawn if len(latex) < LONG else f'<span class="long">{drawn}</span>'
    latex = re.sub(r"\\(max|min|sup|inf)_", r"\\\1\\limits_", latex)
    convert = latex2mathml.converter.convert
    drawn = "".join(convert(part, display="block") for part in latex.split(r"\qquad"))
    return f'\n\n<div class="formula">{drawn}</div>\n\n'


# --- pages that are made from the source


def commands() -> str:
    """The manual of every command, as the command line has it."""
    from fenchel.cli import TASKS, app

    page = ["# Commands"]
    for task, names in TASKS.items():
        page.append(f"## {task}")
        page += [
            app[name].generate_docs(heading_level=3, usage_name=f"fenchel {name}") for name in names
        ]
    return "\n\n".join(page)


def packages() -> list[str]:
    """Every package below ``fenchel`` that lists public names."""
    files = (ROOT / "fenchel").rglob("__init__.py")
    return sorted(
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in files
        if "__all__ = " in file.read_text(encoding="utf-8") and file.parent.name != "fenchel"
    )


def api(package: str) -> str:
    """The page of a package: its docstring, then each of its modules with the public names."""
    tree = parse(package)
    public: dict[str, list[str]] = {}  # module to names; none for a module that is public itself
    for node in ast.walk(tree):  # names that are loaded at their first use stand under an if
        if isinstance(node, ast.ImportFrom) and node.module == package:
            public.update({f"{package}.{alias.name}": [] for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fenchel."):
            public.setdefault(node.module or "", []).extend(alias.name for alias in node.names)
    page = [f"# {package}", markdown(ast.get_docstring(tree) or "")]
    for module, names in public.items():
        if module not in packages() and max(filter(module.startswith, packages())) == package:
            page += module_section(module, names, package)
    return "\n\n".join(page) + "\n"


def parse(module: str) -> ast.Module:
    """The source of a module or of a package."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def module_section(module: str, names: list[str], package: str) -> Iterator[str]:
    """The heading of a module, its docstring, and its public definitions."""
    tree = parse(module)
    yield f"## {module}"
    yield markdown(ast.get_docstring(tree) or "")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if node.name in names or (not names and not node.name.startswith("_")):
            yield from definition(node, package if names else module)


def definition(node: ast.FunctionDef | ast.ClassDef, owner: str, level: int = 3) -> Iterator[str]:
    """A function, or a class with its fields and methods."""
    yield f"{'#' * level} {node.name}"
    name = f"{owner}.{node.name}" if level == 3 else node.name
    yield f"```python\n{signature(node, name)}\n```"
    yield markdown(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        yield from fields(node)
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                yield from definition(part, owner, level + 1)


def fields(node: ast.ClassDef) -> Iterator[str]:
    """A list of the annotated fields, each with the docstring below it."""
    lines = []
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(part, ast.AnnAssign) or ast.unparse(part.target).startswith("_"):
            continue
        value = "" if part.value is None else f" = {ast.unparse(part.value)}"
        meaning = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            meaning = ": " + escape(" ".join(str(after.value.value).split()))
        code = f"{ast.unparse(part.target)}: {ast.unparse(part.annotation)}{value}"
        lines.append(f"- `{code}`{meaning}")
    if lines:
        yield "\n".join(lines)


def signature(node: ast.FunctionDef | ast.ClassDef, name: str) -> str:
    """How the name is called; on several lines where one is too long."""
    if isinstance(node, ast.ClassDef):
        made = [p for p in node.body if isinstance(p, ast.FunctionDef) and p.name == "__init__"]
        if not made:
            return f"class {name}"
        text, result = f"class {name}", ""
        arguments = ast.unparse(made[0].args).removeprefix("self").removeprefix(", ")
    else:
        text = name
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        arguments = ast.unparse(node.args)
    if len(text + arguments + result) < 86:
        return f"{text}({arguments}){result}"
    return f"{text}(\n    " + ",\n    ".join(split(arguments)) + f",\n){result}"


def split(arguments: str) -> list[str]:
    """At commas outside brackets and strings.

    >>> split("a: tuple[int, int], *, b='x, y'")
    ['a: tuple[int, int]', '*', "b='x, y'"]
    """
    parts, depth, quoted = [""], 0, ""
    for character in arguments:
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "'\"":
            quoted = character
        depth += (character in "([{") - (character in ")]}") if not quoted else 0
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def markdown(docstring: str) -> str:
    """A docstring, which is plain text: doctests and formulas become code."""
    return "\n\n".join(paragraph(part) for part in re.split(r"\n\s*\n", docstring) if part.strip())


def paragraph(text: str) -> str:
    """One paragraph of a docstring as Markdown."""
    lines = text.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    if text.lstrip().startswith(">>>"):
        return "\n".join(["```pycon", *(line[indent:] for line in lines), "```"])
    if indent >= 4:
        return "\n".join(["```text", *(line[indent:] for line in lines), "```"])
    return escape(text)


def escape(text: str) -> str:
    """Plain text in which only code between backticks means something."""
    parts = re.split(r"(``.*?``|`[^`]*`)", text, flags=re.DOTALL)
    parts[::2] = [
        re.sub(r"([*_\[\]$#|~])", r"\\\1", html.escape(p, quote=False)) for p in parts[::2]
    ]
    return "".join(parts)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
