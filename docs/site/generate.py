"""Gather the site's pages before a builder reads them: ``python docs/site/generate.py``; ``make docs`` does both.

Into ``build/site``: the pages of ``docs`` and a few from elsewhere, with links that lead to each other; the reference,
written from docstrings, rules and verdicts; and the package as it is installed, which mkdocstrings reads, because it
cannot follow the folders of a checkout. A public name without a docstring, or on no page, ends it with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import notebooks
import reference

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).parent
BUILD: Final = ROOT / "build" / "site"

ELSEWHERE: Final[Mapping[str, str]] = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "SUPPORT.md": "versions.md",
    "SECURITY.md": "report-a-weakness.md",
    "CHANGELOG.md": "changelog.md",
    "examples/template/README.md": "examples/template.md",
    "examples/quickstart_pytorch/README.md": "examples/quickstart_pytorch.md",
    "examples/gossip_pytorch/README.md": "examples/gossip_pytorch.md",
    "examples/lora_transformers/README.md": "examples/lora_transformers.md",
}
"""Pages that have another place on the site than in the repository."""

LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")


def sources() -> dict[str, str]:
    """Return by each page's place in the repository its place on the site; both as POSIX paths."""
    ours = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    shown = {f"docs/tutorials/{path.name}": f"tutorials/{path.stem}.md" for path in notebooks.paths()}
    return {name: name.removeprefix("docs/") for name in ours} | shown | dict(ELSEWHERE)


def text_of(name: str) -> str:
    """Return the Markdown of a source; of a notebook, what it shows."""
    path = ROOT / name
    return notebooks.page(path)[0] if path.suffix == ".ipynb" else path.read_text("utf-8")


PICTURE: Final = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]*)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]*)">\s*</picture>'
)
"""A figure as README shows it, which has to change its theme without the site's style sheet."""

FENCE: Final = re.compile(r"^```(\w+) \w+$", re.MULTILINE)
"""The opening of a block that says more than its language, which is for the tests of the pages."""


def fitted(text: str, page: str, places: Mapping[str, str]) -> str:
    """Return a page of the repository as builders take it: links to other pages lead to their place on the site.

    Links to files that are not on the site become their text, as code where that is the file's name. A target that is
    no file of the repository stays as it is, and the builder says that it is broken. A figure in two themes becomes two
    images, of which the site shows one.
    """
    start = PurePosixPath(places.get(page, page)).parent

    def shown(found: re.Match[str]) -> str:
        def image(theme: str) -> str:
            path = os.path.normpath(PurePosixPath(page).parent / found[theme]).removeprefix("docs/")
            return f"![{found['alt']}]({PurePosixPath(os.path.relpath(path, start)).as_posix()}#only-{theme})"

        return f"{image('light')}\n{image('dark')}"

    def replaced(found: re.Match[str]) -> str:
        words, target, anchor = found["text"], found["target"], found["anchor"] or ""
        if "://" in target:
            return found[0]
        path = PurePosixPath(os.path.normpath(PurePosixPath(page).parent / target)).as_posix()
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        if path in places:
            return f"[{words}]({PurePosixPath(os.path.relpath(places[path], start)).as_posix()}{anchor})"
        if not (ROOT / path).exists():
            return found[0]
        return f"`{words}`" if path.endswith(words) else words

    return FENCE.sub(r"```\1", LINK.sub(replaced, PICTURE.sub(shown, text)))


def generated() -> dict[str, str]:
    """Return the pages that are written from the code, by their place on the site."""
    pages = reference.entries()
    shown = reference.names_of(pages)
    made = {f"reference/{key}.md": reference.page(key, listed) for key, listed in pages.items()}
    for key, listed in pages.items():
        if tables := [reference.options(entry, shown) for entry in reference.with_options(listed)]:
            title = f"# Options: {reference.AREAS[key].title[0].lower()}{reference.AREAS[key].title[1:]}\n"
            made[f"options/{key}.md"] = "\n".join([title, *tables])
    return made | {
        "options/settings.md": reference.settings(),
        "reference/commands.md": reference.commands(),
        "reference/modules.md": reference.modules(),
    }


def unpack_wheel(folder: Path) -> None:
    """Build the package's wheel and unpack it into ``folder``.

    Raises
    ------
    subprocess.CalledProcessError
        When it cannot be built; pip says why.
    """
    # What an earlier build left there would be part of the wheel, modules that are deleted since among it.
    for left in [*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist.*")]:
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory() as made:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", made, str(ROOT)], check=True)
        (wheel,) = Path(made).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)


def main() -> None:
    """Write everything anew."""
    shutil.rmtree(BUILD, ignore_errors=True)
    places = sources()
    pages = {place: fitted(text_of(name), name, places) for name, place in places.items()}
    for place, text in (pages | generated()).items():
        path = BUILD / "pages" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    for path in notebooks.paths():
        shutil.copy(path, BUILD / "pages" / "tutorials")
        for name, figure in notebooks.page(path)[1].items():
            (BUILD / "pages" / "tutorials" / name).write_text(figure, "utf-8")
    shutil.copytree(ROOT / "docs" / "figures", BUILD / "pages" / "figures")
    shutil.copy(HERE / "site.css", BUILD / "pages")
    texts = reference.prepared(reference.entries())
    (BUILD / "docstrings.json").write_text(json.dumps(texts), "utf-8")
    unpack_wheel(BUILD / "wheel")


if __name__ == "__main__":
    main()
