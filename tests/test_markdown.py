"""A model's text can't become HTML, script, pictures or script links, in any Markdown reader."""

import random
from html.parser import HTMLParser

import mistune
import pytest
from markdown_it import MarkdownIt
from nbconvert.filters.markdown_mistune import markdown2html_mistune

from mlx_jupyter.notebook.markdown import plain, safe_markdown

# Readers with raw HTML switched on, as a trusted notebook has it.
COMMONMARK = MarkdownIt("commonmark", {"html": True})
GFM = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
MISTUNE = mistune.create_markdown(
    escape=False, renderer="ast", plugins=["table", "strikethrough", "footnotes", "math", "url"]
)

PIECES = [
    "<img src=x onerror=alert(1)>", "<script>", "</b>", "<!-- ", "<?x?>", "<b\n>",
    "<javascript:x>",
    "&lt;", "&#60;", "&", "<", ">", "`", "``", "```", "````", "~~~", "\\", "\\`", "|", "\n", "\n\n",
    "\n    ", "\n  ", "\n- ", "\n1. ", "\n> ", "\n\t", "\n|-|-|\n", "| a | b |", "![", "[", "](",
    ")", "](javascript:alert(1))", "[x]: javascript:y\n", "[x]", "JaVaScRiPt:", "data\\:", "$",
    "$$", "\n$$\n", "\\begin{x}", "\\end{x}", "\\\\[", "\\\\]", "\\(", "\\)",
    "\n```\n", "\n~~~\n", "`<b>`",
    "*", "_", "#", "===", "---", "a", " ", "python", "\r", "\x1b[31m", "é", "'", '"', "!", "<b",
]  # fmt: skip


def dangers(markdown):
    """What a reader would make of it that does something."""
    found = []
    for reader in (COMMONMARK, GFM):
        for token in reader.parse(markdown):
            for each in (token, *(token.children or ())):
                if each.type in {"html_block", "html_inline", "image"}:
                    found.append((each.type, each.content))
                href = str(each.attrGet("href") or "")
                if each.type == "link_open" and href.lower().startswith(
                    ("javascript:", "vbscript:", "data:")
                ):
                    found.append(("link", href))
    found += _walk(MISTUNE(markdown))
    tags = Tags()
    tags.feed(markdown2html_mistune(markdown))
    return found + tags.found


class Tags(HTMLParser):
    """Tags in nbconvert's HTML that Markdown itself wouldn't make."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        if tag in {"img", "script", "b"} or any(name.startswith("on") for name, _ in attrs):
            self.found.append(("tag", tag, attrs))


def _walk(tokens):
    for token in tokens:
        if token["type"] in {"inline_html", "block_html", "image"}:
            yield token["type"], token
        if token["type"] == "link":
            url = token["attrs"]["url"].lower()
            if url.startswith(("javascript:", "vbscript:", "data:")):
                yield "link", url
        yield from _walk(token.get("children") or ())


def test_the_readers_do_see_danger():
    raw = "<b>x</b> ![](http://x) [a](javascript:b)"
    assert {kind for kind, *_ in dangers(raw)} >= {"html_inline", "image", "inline_html", "tag"}


@pytest.mark.parametrize("seed", range(20))
def test_random_text_is_harmless(seed):
    pick = random.Random(seed)
    for _ in range(150):
        text = "".join(pick.choices(PIECES, k=pick.randint(1, 24)))
        assert not dangers(safe_markdown(text)), repr(text)


@pytest.mark.parametrize(
    "text",
    [
        "| `a | `<img src=x onerror=alert(1)> | `b` |\n|-|-|-|\n| x |",
        "| h | i |\n|-|-|\n| `a|b` `<img src=x onerror=alert(1)>` |",
        "text\n    ```\n\n<img src=x onerror=alert(1)>\n```",
        "> ```\n<img src=x onerror=alert(1)>\n> ```",
        "$$\n```\nx\n$$\ny\n```\ntext\n```\n<img src=x onerror=alert(1)>\n```",
        "$$\n x `a $$ <img src=x onerror=alert(1)>` $$",
        "$a `b$ <img src=x onerror=alert(1)>` $",
        "\\begin{x}\n```\n\\end{x}\n```\n```\n<img src=x onerror=alert(1)>\n```",
        "`\n<img src=x onerror=alert(1)>`",
        "``` `<img src=x onerror=alert(1)>`",
        "[a](java&#115;cript:alert(1)) [b](javascript\\:alert(1))",
        "\\\\![x](http://x)",
    ],
)
def test_known_tricks(text):
    assert not dangers(safe_markdown(text))


@pytest.mark.parametrize(
    "text",
    [
        "Use `vector<int>` and `a && b`.",
        "a < b, x <3, 3 <= 4 and R & D",
        "$x < 0$ and $a_{1}$",
        "# Title\n\n- one\n- two **bold**\n\n1. x\n2. y",
        "| a | b |\n|---|---|\n| `x` | y |",
        "[link](https://example.org) and `a|b`",
    ],
)
def test_ordinary_markdown_is_unchanged(text):
    assert safe_markdown(text) == text


def test_code_blocks_keep_their_text():
    code = "if a < b && c:\n    `x` = '<b>'\n\n    ```\n"
    shown = COMMONMARK.parse(safe_markdown(f"Look:\n````python\n{code}````\nDone <b>."))
    block = next(token for token in shown if token.type == "fence")
    assert (block.info, block.content) == ("python", code)


def test_indented_and_unclosed_code_blocks():
    shown = COMMONMARK.parse(safe_markdown("1. do\n   ```html\n   <b>\n     <i>"))
    block = next(token for token in shown if token.type == "fence")
    assert block.content == "<b>\n  <i>\n"


def test_math_with_a_letter_after_less_than():
    assert safe_markdown("$a<b$ but a<b") == "$a< b$ but a&lt;b"
    assert safe_markdown("$$\na<b & c\n$$") == "$$\na< b & c\n$$"


def test_plain_shows_control_characters():
    assert plain("a\x1b[31mb\x00\x7f\x9b\tc\r\nd") == "a␛[31mb␀␡\ufffd\tc\nd"
