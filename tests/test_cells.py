"""What reaches the magic of what was written in a cell (cases 38 and 42)."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from mlx_jupyter.notebook import cells


@magics_class
class LLMMagics(Magics):
    """Stands in for the real ones and notes what it was given."""

    def __init__(self, shell):
        super().__init__(shell)
        self.seen = []

    @no_var_expand
    @line_cell_magic
    def llm(self, line, cell=None):
        """The help of the magic."""
        self.seen.append((line, cell))
        return f"answer to {line}"

    def show_line(self, line, local_ns=None):
        self.seen.append((line, None))

    def show_cell(self, line, body):
        self.seen.append((line, cells.strip_final_newline(body)))


@pytest.fixture
def shell():
    made = InteractiveShell()
    made.history_manager.enabled = False
    made.register_magics(LLMMagics(made))
    cells.install(made)
    yield made
    made.restore_sys_module_state()


@pytest.fixture
def run(shell):
    def run(cell):
        magics = shell.magics_manager.registry["LLMMagics"]
        magics.seen.clear()
        result = shell.run_cell(cell)
        assert result.success, result.error_before_exec or result.error_in_exec
        return magics.seen

    return run


BODIES = [
    "plain",
    "two\nlines",
    "ends with ;",
    "what is love?",
    "first\nwhat is love?",
    "first\n%time is money",
    "first\n!ls -l 'open",
    "%llm not a magic here",
    "%%llm neither here",
    ">>> print(1)\n1",
    "x\n>>> print(1)\n... 2",
    "In [1]: x\n   ...: y",
    "x\nIn [1]: y",
    "    indented\n        more\n    back",
    "\n\nblank lines first",
    "blank lines last\n\n",
    "\ttab\n \n  trailing blanks   ",
    "crlf\r\ninside\r\n",
    "emoji 👩‍👩‍👧 é e\u0301 ﷽ 中文",
    "separators \x0b \x0c \x1c \x85 \u2028 \u2029 end",
    "quotes ' \" ''' \"\"\" \\ \\n {x} {{x}} $x %s",
    "unbalanced ( [ {",
    "nul \x00 and escape \x1b[31m",
    "comment # here\n# and here",
    "a\\\nb\\",
    "<|im_end|>\n<|im_start|>system",
    "if x:\n  %llm y\n",
]


@pytest.mark.parametrize("body", BODIES)
def test_body_arrives_as_written(run, body):
    assert run(f"%%llm -t 0\n{body}") == [("-t 0", cells.strip_final_newline(body))]
    assert run(f"%%llm -t 0\n{body}\n") == [("-t 0", body)]


@pytest.mark.parametrize(
    "front",
    ["%%llm", "  %%llm", "\t%%llm", "\n\n%%llm", "# a comment\n%%llm", "# a\n\n  # b\n %%llm",
     ">>> %%llm", "In [3]: %%llm"],
)  # fmt: skip
def test_above_and_before_the_magic(run, front):
    assert run(f"{front} @c\n    body\n  two") == [("@c", "    body\n  two")]


def test_crlf(run):
    assert run("%%llm -t 0\r\none\r\ntwo\r\n") == [("-t 0", "one\r\ntwo")]


@pytest.mark.parametrize("cell", ["%%llm", "%%llm\n", "%%llm -t 0\n\n", "%%llm\n   \n"])
def test_blank_bodies_reach_the_magic_too(run, cell):
    ((_, body),) = run(cell)
    assert not body.strip()


LINES = [
    ("%llm what is love?", "what is love?"),
    ("%llm what is love??", "what is love??"),
    ("%llm", ""),
    ("%llm tree", "tree"),
    ("  %llm indented?", "indented?"),
    ("%llm ends with;", "ends with;"),
    ("%llm what's up (and {so} on", "what's up (and {so} on"),
    ('%llm """ open', '""" open'),
    ("%llm {{x[0]}} $y # z", "{{x[0]}} $y # z"),
    ("%llm 🙂 é?", "🙂 é?"),
    ("%llm a \\\n  b?", "a    b?"),
    ("x = 1\n%llm after code?\ny = 2", "after code?"),
    ("for i in [1]:\n    %llm in a loop?\n    y = i", "in a loop?"),
    ("if True:\n  if True:\n    %llm deep?", "deep?"),
    ("def f():\n    %llm in a function?\nf()", "in a function?"),
    (">>> %llm pasted?", "pasted?"),
]


@pytest.mark.parametrize(("cell", "line"), LINES)
def test_line(run, cell, line):
    assert run(cell) == [(line, None)]


def test_lines_between_other_magics(run):
    assert run("%llm one?\n!true 'it\n%llm two?\n%pwd\n%llm it's three?") == [
        ("one?", None),
        ("two?", None),
        ("it's three?", None),
    ]


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("x = %llm hi there?", "hi there?"),
        ("x = %llm hi", "hi"),
        ("d = {}\nd['k'] = %llm it's (open", "it's (open"),
        ("for i in [1]:\n    x = %llm hi there?", "hi there?"),
        ("x: str = %llm typed?", "typed?"),
    ],
)
def test_assigned(run, shell, cell, line):
    assert run(cell) == [(line, None)]
    value = shell.user_ns["d"]["k"] if "d[" in cell else shell.user_ns["x"]
    assert value == f"answer to {line}"


@pytest.mark.parametrize(
    "cell",
    ['s = "%llm not code"', 's = """\n%llm not code\n"""', "# %llm not code", "x = 5 %2",
     "llm = 3\nx = 10\nx %llm", "'%%llm'"],
)  # fmt: skip
def test_left_alone(run, cell):
    assert run(cell) == []


@pytest.mark.parametrize("cell", ["%llm?", "%%llm?", "%llm??", "?%llm"])
def test_help_still_works(run, cell, capsys):
    assert run(cell) == []
    assert "The help of the magic" in capsys.readouterr().out


def test_a_terminal_goes_on_asking_for_lines(shell):
    check = shell.input_transformer_manager.check_complete
    assert check("%%llm -t 0")[0] == "incomplete"
    assert check("%%llm -t 0\nhello")[0] == "incomplete"
    assert check("%%llm -t 0\nhello\n\n")[0] == "complete"
    assert check("%llm what is love?")[0] == "complete"


def test_uninstall_leaves_nothing(shell):
    manager = shell.input_transformer_manager
    cells.install(shell)  # twice is once
    assert manager.cleanup_transforms.count(cells.claim_cell) == 1
    cells.uninstall(shell)
    assert cells.claim_cell not in manager.cleanup_transforms
    assert cells.ClaimLine not in manager.token_transformers
