"""The parts of the docs' site that mkdocs does not have by itself; `mkdocs.yml` names this file as its hook.

Runs in the site's own environment, which alone has mkdocs. Owns: the navigation, which is the list in docs/index.md; pages that are no file of
docs/; links that leave the site. Forges show the same files as they are, so nothing in them is meant for mkdocs alone.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages beside the docs that the site shows."""
DECISIONS = "# Decisions\n\nChoices that could have gone otherwise: what was chosen, and why.\n"
_LINK = re.compile(r"(?<!!)\[((?:`[^`]*`|[^\[\]`])+)\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^()\s#]+)\)")
_ITEM = re.compile(r"(?:-|\d+\.) ")
_ELSEWHERE = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: a section for each heading of the front page, an entry for each item under it, behind a README.md its folder."""
    sections: dict[str, list[str | dict[str, str]]] = {}
    heading = ""
    for line in (ROOT / "docs/index.md").read_text(encoding="utf-8").splitlines():
        if found := _HEADING.match(line):
            heading = found[1]
        elif found := _ENTRY.match(line):
            target = site_path("index.md", found[2]) or found[2]
            sections.setdefault(heading, []).extend([{found[1]: target}, *_beside(target)])
    sections["Decisions"] = ["decisions/index.md", *(f"decisions/{path.name}" for path in _decisions())]
    config["nav"] = [{"Home": "index.md"}, *({name: pages} for name, pages in sections.items())]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what is no file of docs/."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in _decisions()}
    text = "\n".join([DECISIONS, *(f"- [{title}]({name})" for name, title in titles.items())])
    files.append(File.generated(config, "decisions/index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to other files of the repository into pages of the site, or into plain text where the site has no such page."""
    del config, files

    def moved(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path, hash_sign, anchor = target.partition("#")
        if ":" in target or not path:
            return link[0]
        there = site_path(page.file.src_uri, path)
        if there is not None:
            relative = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
            return f"[{text}]({relative}{hash_sign}{anchor})"
        return text if (ROOT / _repository_path(page.file.src_uri, path)).exists() else link[0]

    return _LINK.sub(moved, nested(markdown))


def nested(markdown: str) -> str:
    """Lists as Python-Markdown wants them: an empty line before them, and four columns before what stands in an item."""
    lines: list[str] = []
    fence_column = None
    for line in markdown.splitlines():
        column = len(line) - len(line.lstrip())
        moved_by = 4 - column if 0 < column < 4 else 0
        if line.lstrip().startswith("```"):
            fence_column = column if fence_column is None else None
        elif fence_column is not None:
            moved_by = 4 - fence_column if 0 < fence_column < 4 else 0
        elif _ITEM.match(line) and lines and lines[-1] and not lines[-1].startswith(" ") and not _ITEM.match(lines[-1]):
            lines.append("")
        lines.append(" " * moved_by + line if line else line)
    return "\n".join(lines)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Refuse pages that fetch something from elsewhere."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := _ELSEWHERE.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path}: must fetch nothing from elsewhere; got {found[0]}")


def site_path(source: str, target: str) -> str | None:
    """Path within the site of what the page `source` names `target`; None where the site has no such page."""
    path = _repository_path(source, target)
    if path == "README.md":
        return "index.md"
    if path == "docs/decisions":
        return "decisions/index.md"
    if path in ROOT_PAGES:
        return path
    return path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else None


def _repository_path(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join("" if source in ROOT_PAGES else "docs", posixpath.dirname(source), target))


def _beside(target: str) -> list[str]:
    """The other pages of a folder whose README.md is listed."""
    folder, name = posixpath.split(target)
    if name != "README.md":
        return []
    return [f"{folder}/{path.name}" for path in sorted((ROOT / "docs" / folder).glob("*.md")) if path.name != name]


def _decisions() -> list[Path]:
    return [path for path in sorted((ROOT / "docs/decisions").glob("*.md")) if path.name != "0000-template.md"]
