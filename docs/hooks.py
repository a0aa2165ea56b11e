"""Pages of the site that are made from the source, for mkdocs.yml.

The front page is README.md, the pages of contributors are CONTRIBUTING.md and CHANGELOG.md, the
commands are described by the command line itself, and every package with public names gets a page
of its docstrings. LaTeX becomes MathML, which browsers draw without a script.
"""

import ast
import html
import re
from pathlib import Path

import griffe
import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PICTURES = ("benchmarks/results/optim_full.svg", "benchmarks/results/optim_cuda.svg")


def packages() -> list[str]:
    """Every package below ``fenchel`` that lists public names."""
    files = (ROOT / "fenchel").rglob("__init__.py")
    return sorted(
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in files
        if "__all__ = " in file.read_text() and file.parent.name != "fenchel"
    )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the packages into the navigation."""
    for entry in config.nav or []:
        if "Python API" in entry:
            entry["Python API"] = [{package: f"api/{package}.md"} for package in packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for source, page in PAGES.items():
        files.append(
            File.generated(config, page, content=relocate_links((ROOT / source).read_text()))
        )
    for picture in PICTURES:
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    files.append(File.generated(config, "commands.md", content=commands()))
    for package in packages():
        files.append(File.generated(config, f"api/{package}.md", content=api(package)))
    return files


def api(package: str) -> str:
    """The page of a package: its docstring, then each of its modules with the public names."""
    tree = ast.parse((ROOT / Path(*package.split(".")) / "__init__.py").read_text())
    public: dict[str, list[str]] = {}  # module to names; none for a module that is public itself
    for node in ast.walk(tree):  # names that are loaded at their first use stand under an if
        if isinstance(node, ast.ImportFrom) and node.module == package:
            public.update({f"{package}.{alias.name}": [] for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fenchel."):
            public.setdefault(node.module or "", []).extend(alias.name for alias in node.names)
    page = [f"# {package}", "", ast.get_docstring(tree) or ""]
    for module, names in public.items():
        if module not in packages() and max(filter(module.startswith, packages())) == package:
            page += ["", f"::: {module}"]
            page += ["    options:", f"      members: {names}"] if names else []
    return "\n".join(page)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to pictures beside docs/ lead to their copies in the site."""
    return markdown.replace("](../benchmarks/", "](benchmarks/")


def relocate_links(text: str) -> str:
    """The links of a page of the repository's root, relative to docs/."""
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\]\(docs/", "](", text)


def commands() -> str:
    """The manual of every command, as the command line has it."""
    from fenchel.cli import app

    return app.generate_docs(output_format="markdown")


def on_page_content(html: str, **_: object) -> str:
    """LaTeX to MathML."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', mathml, html, flags=re.DOTALL
    )


def mathml(formula: re.Match[str]) -> str:
    """One formula, inline or on a line of its own."""
    display = "block" if formula[2] == "[" else "inline"
    latex = html.unescape(formula[3]).replace(r"\arg", r"\operatorname{arg}")
    return latex2mathml.converter.convert(latex, display=display)


class PlainText(griffe.Extension):
    """Docstrings are plain text: doctests become code, and < in a sentence is no tag."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Mark up one docstring, once."""
        if obj.docstring:
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(markdown, paragraphs))


def markdown(paragraph: str) -> str:
    """One paragraph of a docstring as Markdown."""
    if paragraph.lstrip().startswith(">>>"):
        lines = paragraph.splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        return "\n".join(["```pycon", *(line[indent:] for line in lines), "```"])
    if paragraph.startswith("    "):
        return paragraph  # a formula: preformatted
    parts = re.split(r"(``.*?``|`.*?`)", paragraph, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
