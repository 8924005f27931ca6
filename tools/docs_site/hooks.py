"""Hooks of MkDocs: the pages that are generated when the site is built, and links to files of the repository.

The documents in docs/ remain readable as plain files: they link to the README, protos and examples by relative paths.
On the site, README.md is the home page, and each other file that a document links to has a page that shows it.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from tools.docs_site.api import render_api
from tools.docs_site.commands import render_commands
from tools.docs_site.lists import indent_lists
from tools.docs_site.metrics import render_metrics
from tools.docs_site.pages import HOME, ROOT, find_copies, page_of, relocate_links
from tools.docs_site.performance import PAGE, read_reports, render_performance
from tools.docs_site.pipeline_file import render_pipeline_file

_MERMAID = ROOT / "node_modules/@mermaid-js/tiny/dist/mermaid.tiny.js"
# Later versions have ids in their diagrams by which the theme cannot set the colors of arrows.
_SCRIPT = "assets/mermaid.js"
"""The path of mermaid in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds mermaid, the generated pages, and the pages of the README and of the files to which documents link.

    Raises PluginError if mermaid is not installed.
    """
    documents = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    documents[HOME] = (ROOT / HOME).read_text()
    copies = {HOME: documents[HOME]} | find_copies(documents)
    pages = {page_of(path): relocate_links(path, markdown) for path, markdown in copies.items()}
    pages |= render_api()
    pages["reference/commands.md"] = render_commands()
    pages["reference/metrics.md"] = render_metrics()
    pages["reference/pipeline-file.md"] = render_pipeline_file()
    for path, markdown in pages.items():
        files.append(File.generated(config, path, content=markdown))
    if not _MERMAID.exists():
        raise PluginError("mermaid, which draws the diagrams, is not installed: run `npm ci` in the repository's root")
    files.append(File.generated(config, _SCRIPT, abs_src_path=str(_MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Returns a page with lists that Python-Markdown reads. In documents of docs/, also relocates the links.

    The page of performance has charts, which its file in docs/ lacks.
    """
    if page.file.src_uri == PAGE.name:
        markdown = render_performance(read_reports())
    if page.file.generated_by is None:
        markdown = relocate_links(f"docs/{page.file.src_uri}", markdown)
    return indent_lists(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Adds mermaid to a page with diagrams. The theme loads it from another host if the page has none."""
    if '<pre class="mermaid">' not in html:
        return html
    return f'{html}<script src="{get_relative_url(_SCRIPT, page.url)}"></script>'
