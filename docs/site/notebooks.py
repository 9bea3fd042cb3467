"""Run the tutorials that are notebooks and store what they print: ``python docs/site/notebooks.py [NAME ...]``.

A stored notebook holds its outputs, so that a reader sees them without running anything. The site shows it as a page
(:func:`page`), and a test runs all of them and compares their text with the stored one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs" / "tutorials"

FIGURES: Final = (
    "--InlineBackend.figure_formats=svg",
    # Without a date: a figure is the same in every run.
    "--InlineBackend.print_figure_kwargs={'metadata': {'Date': None}, 'bbox_inches': 'tight'}",
)
ENVIRONMENT: Final[Mapping[str, str]] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
    "MATPLOTLIBRC": str(Path(__file__).with_name("matplotlibrc")),
}


def paths() -> list[Path]:
    """Return the notebooks, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    """Return a notebook as the JSON that it is."""
    return json.loads(path.read_text("utf-8"))


def executed(path: Path) -> Any:
    """Run a notebook in a new process and return it with the outputs of that run.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        When one of its cells does.
    """
    import nbclient
    import nbformat
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="fedcomp-") as folder:
        # Sockets in the file system, so that nothing listens on the network; by default two runs would share them.
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}
        client = nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=list(FIGURES),
            config=Config({"KernelManager": sockets}),
            resources={"metadata": {"path": str(ROOT)}},
        )
        client.execute(env=os.environ | ENVIRONMENT)
    # Without the version of Python that happened to run it.
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def texts(notebook: Any) -> Iterator[str]:
    """Yield what every cell of code prints, a figure as the words that stand in its place."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(_text(output) for output in cell["outputs"])


def page(path: Path) -> tuple[str, dict[str, str]]:
    """Return a stored notebook as a page of the site, and its figures by name."""
    parts: list[str] = []
    figures: dict[str, str] = {}
    for cell in read(path)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            drawn = output.get("data", {}).get("image/svg+xml")
            if drawn is None:
                parts.append(f"```text\n{_text(output).rstrip()}\n```")
            else:
                name = f"{path.stem}-{len(figures) + 1}.svg"
                figures[name] = "".join(drawn)
                parts.append(f"![{cell['metadata']['alt']}]({name})")
    # Not a link of Markdown: that would lead to this page.
    parts.append(f'This page is a notebook: <a href="{path.name}" download>{path.name}</a>.')
    return "\n\n".join(parts) + "\n", figures


def _text(output: Mapping[str, Any]) -> str:
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def main() -> None:
    """Run the notebooks that are named, or all, and write them with their outputs."""
    import nbformat

    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or paths():
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
