"""Links in the documentation lead somewhere, and every environment variable that is read is documented."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listing.stdout.splitlines()]


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    prose = CODE.sub("", page.read_text())
    missing = [link for link in LINK.findall(prose) if not (page.parent / link).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_pages(page):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", CODE.sub("", page.read_text()))
    targets = [((page.parent / name) if name else page, anchor) for name, anchor in links]
    assert [f"{to.name}#{at}" for to, at in targets if to.suffix == ".md" and at not in anchors(to)] == []


def test_environment_variables_are_documented():
    page = (ROOT / "docs" / "environment.md").read_text()
    read = set()
    for source in tracked("tessera/*.cpp", "tessera/*.h"):
        read |= set(re.findall(r'env::get(?:_int)?\("(\w+)"\)', source.read_text()))
    for source in tracked("python/tessera/*.py"):
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', source.read_text()))
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_messages_of_the_page_of_errors_are_in_the_sources():
    """The parts of a message that a row has, without what "..." stands for."""
    rows = re.findall(
        r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text().partition("## What to do")[2], re.M
    )
    sources = "".join(path.read_text() for path in tracked("tessera/*.cpp", "tessera/*.h", "python/tessera/*.py"))
    said = re.sub(r'"\s*f?"', "", sources)  # literals that follow one another
    parts = [part.strip() for row in rows for part in row.split("...")]
    assert len(rows) > 15 and [part for part in parts if part not in said] == []


def test_former_names_are_in_the_list_of_changes():
    page = (ROOT / "CHANGELOG.md").read_text()
    source = (ROOT / "python" / "tessera" / "_former.py").read_text()
    names = re.findall(r'"(\w+)": (?:"\w+"|None)', source)
    for path in tracked("python/tessera/*.py"):
        names += re.findall(r"@former_methods\((\w+)=", path.read_text())
    version = re.search(r'TESSERA_VERSION "(.*)"', (ROOT / "tessera" / "base" / "version.h").read_text())
    assert len(names) >= 14 and [name for name in names if name not in page] == []
    assert version and f"## {version[1]}" in page


def test_pages_are_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in tracked("docs/*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []


PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in tracked("docs/*.md"))]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name):
    page, limit = ROOT / name, 150 if name == "README.md" else 200
    seen = re.sub(r"^<!-- (?:run|cpp):.*?-->\n", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(seen.splitlines()) <= limit, "split it by subject, or tighten it"


@pytest.mark.parametrize("name", PAGES)
def test_lines_of_a_page_are_short(name):
    """What stands in the source; cells of tables cannot be broken."""
    lines = CODE.sub("", (ROOT / name).read_text()).splitlines()
    assert [line for line in lines if len(line) > 200 and not line.startswith("|")] == []
