"""The command line: one table of what each line means, one of what each mistake is told."""

import pytest

from mlx_jupyter.notebook import options
from mlx_jupyter.notebook.commands import (
    Ask,
    Branches,
    CommandError,
    Drop,
    Forget,
    Help,
    Load,
    Log,
    Models,
    Origin,
    Overview,
    Pages,
    Restore,
    Save,
    Status,
    Store,
    Tree,
    Unload,
)
from mlx_jupyter.notebook.grammar import parse_cell, parse_line

LINES = [
    # Case 38: a whole line that parses as a subcommand is one, anything else is a prompt.
    ("", Overview()),
    ("   ", Overview()),
    ("# only a note", Overview()),
    ("what is love?", Ask("what is love?")),
    ("what's up?", Ask("what's up?")),
    ("tree", Tree()),
    ("pages", Pages()),
    ("pages of a book", Ask("pages of a book")),
    ("tree  # the picture", Tree()),
    ("tree of life", Ask("tree of life")),
    ("-- tree", Ask("tree")),
    ("--   --raw is a flag", Ask("--raw is a flag")),
    ("status", Status()),
    ("status report, please", Ask("status report, please")),
    ("models", Models()),
    ("branches", Branches()),
    ("branches of physics", Ask("branches of physics")),
    ("load org/name", Load(("org/name",))),
    ("load 'my dir/model'", Load(("my dir/model",))),
    ("load the truck", Ask("load the truck")),
    ("load smol-2 org/name ./dir", Load(("smol-2", "org/name", "./dir"))),
    ("load balancing explained", Ask("load balancing explained")),
    ("load m1 and m2", Ask("load m1 and m2")),
    ("load m --adapter runs/poet", Load(("m",), "runs/poet")),
    ("load --adapter runs/poet m", Load(("m",), "runs/poet")),
    ("load m --adapter", CommandError),
    ("load a b --adapter c", CommandError),
    ("load -m x", Ask("load -m x")),
    ("load", Ask("load")),
    ("load # which?", Ask("load # which?")),
    ("load 'it", Ask("load 'it")),
    ("unload", Unload()),
    ("unload a", Unload("a")),
    ("unload a b", Ask("unload a b")),
    ("log @main", Log("main")),
    ("log main", Ask("log main")),
    ("log in", Ask("log in")),
    ("drop @a.b-c", Drop("a.b-c")),
    ("drop it", Ask("drop it")),
    ("save @main", Save("main")),
    ("save @main notes/rain", Save("main", "notes/rain")),
    ("save @main 'my notes/a.llm.safetensors'  # kept", Save("main", "my notes/a.llm.safetensors")),
    ("save @main ~/a.safetensors", Save("main", "~/a.safetensors")),
    ("save", Ask("save")),
    ("save main", Ask("save main")),
    ("save @main -x", Ask("save @main -x")),
    ("save @main @other", Ask("save @main @other")),
    ("save @main ''", Ask("save @main ''")),
    ("save @main for a rainy day", Ask("save @main for a rainy day")),
    ("restore @main", Restore("main")),
    ("restore @main a.llm.safetensors", Restore("main", "a.llm.safetensors")),
    ("restore a.llm.safetensors", Ask("restore a.llm.safetensors")),
    ("restore @main a b", Ask("restore @main a b")),
    ("forget @a.b-c", Forget("a.b-c")),
    ("forget it", Ask("forget it")),
    ("forget @a now", Ask("forget @a now")),
    ("store", Store()),
    ("store clear", Store(clear=True)),
    ("store clear now", Ask("store clear now")),
    ("store all of it", Ask("store all of it")),
    ("help save", Help("save")),
    ("help keeping", Help("keeping")),
    ("help", Help()),
    ("help options", Help("options")),
    ("help load", Help("load")),
    ("help me", Ask("help me")),
    ("-h", Help("options")),
    ("-t 0 --help what", Help("options")),
    # Options, each of them, in every spelling.
    ("-s 'a b' x", Ask("x", system="a b")),
    ('--system "it\'s" x', Ask("x", system="it's")),
    ("--system=terse x", Ask("x", system="terse")),
    ("-m org/name x", Ask("x", models=("org/name",))),
    ("--model=m x", Ask("x", models=("m",))),
    ("-m a -m=b --model c x", Ask("x", models=("a", "b", "c"))),
    ("-m a -m a x", CommandError),
    ("--adapter runs/poet x", Ask("x", adapter="runs/poet")),
    ("-m a --adapter 'my poet' x", Ask("x", models=("a",), adapter="my poet")),
    ("-m a -m b --adapter c x", CommandError),
    ("--adapter", CommandError),
    ("--ctx 100 x", Ask("x", context=100)),
    ("--context={{n}} x", Ask("x", context="{{n}}")),
    ("--ctx many x", CommandError),
    ("-t 0 x", Ask("x", temperature=0.0)),
    ("-t0.5 x", Ask("x", temperature=0.5)),
    ("-t=0.5 x", Ask("x", temperature=0.5)),
    ("-t -1 x", Ask("x", temperature=-1.0)),
    ("--temperature 1e-1 x", Ask("x", temperature=0.1)),
    ("--top-p .9 x", Ask("x", top_p=0.9)),
    ("--top-k 40 x", Ask("x", top_k=40)),
    ("--min-p 0.05 x", Ask("x", min_p=0.05)),
    ("--max 7 x", Ask("x", max_tokens=7)),
    ("--max-tokens=7 x", Ask("x", max_tokens=7)),
    ("--seed 3 x", Ask("x", seed=3)),
    ("--repetition-penalty 1.1 x", Ask("x", repetition_penalty=1.1)),
    (r"--stop '\n\n' --stop END x", Ask("x", stop=("\n\n", "END"))),
    (r'--stop "a\\nb" x', Ask("x", stop=("a\nb",))),
    ("-o r x", Ask("x", output="r")),
    ("--output=r x", Ask("x", output="r")),
    ("r << x", Ask("x", output="r")),
    ("@c r << -t 0 x", Ask("x", branch="c", output="r", temperature=0.0)),
    ("--view none x", Ask("x", view="none")),
    ("--view=tokens x", Ask("x", view="tokens")),
    ("--raw x", Ask("x", raw=True)),
    ("--literal {{x}}", Ask("{{x}}", literal=True)),
    ("--dry-run x", Ask("x", dry_run=True)),
    ("@c x", Ask("x", branch="c")),
    ("@c", CommandError),
    ("@c --from main x", Ask("x", branch="c", origin=Origin("main"))),
    ("@c --from main~2 x", Ask("x", branch="c", origin=Origin("main", 2))),
    ("@c --from @main~ x", Ask("x", branch="c", origin=Origin("main", 1))),
    ("-t {{ t }} x", Ask("x", temperature="{{ t }}")),
    ("--max {{n}} -s {{who}} x", Ask("x", max_tokens="{{n}}", system="{{who}}")),
    # The prompt is kept as it is written.
    ("-t 0   a  b 'c' \"d\" \\e # f -t 5", Ask("a  b 'c' \"d\" \\e # f -t 5", temperature=0.0)),
    ("a -t 5", Ask("a -t 5")),
    ("- item", Ask("- item")),
    ("@ home", Ask("@ home")),
    ("@c/d is a path", Ask("@c/d is a path")),
    ("x;", Ask("x;")),
    ("x << 3", Ask("3", output="x")),
    ("1 << 3", Ask("1 << 3")),
]

MISTAKES = [
    ("--tmp 0 x", "Unknown option --tmp."),
    ("--temprature 0 x", "Did you mean --temperature"),
    ("--temperatur=0 x", "Unknown option --temperatur."),
    ("--temp 0 x", "Unknown option --temp."),
    ("-x x", "Unknown option -x."),
    ("-5 + 3", "Put -- before a prompt that begins with a dash"),
    ("--branch=c x", "Unknown option --branch."),
    ("-t", "-t needs a value: -t TEMP."),
    ("-t warm x", "takes a number, not 'warm'"),
    ("--top-p x x", "--top-p: takes a number, not 'x'"),
    ("--top-k 1.5 x", "--top-k: takes a whole number, not '1.5'"),
    ("--min-p x x", "--min-p: takes a number"),
    ("--max few x", "takes a whole number, not 'few'"),
    ("--seed x x", "--seed: takes a whole number"),
    ("--repetition-penalty x x", "--repetition-penalty: takes a number"),
    ("--stop '' x", "--stop: takes a text that isn't empty"),
    ("-o 1x y", "takes a variable's name, not '1x'"),
    ("--view loud x", "is one of md, text, tokens, none, not 'loud'"),
    ("--raw=1 x", "--raw takes no value."),
    ("--from main x", "name the branch too, such as @new --from main"),
    ("@c --from a~b x", "such as main~2, not 'a~b'"),
    ("-s 'open x", "The quote after -s isn't closed."),
    ("--system='open x", "A quote isn't closed"),
    ("-t 0", "There is no prompt"),
    ("-m", "-m needs a value: -m MODEL."),
    ("-s", "-s needs a value: -s SYSTEM."),
]


@pytest.mark.parametrize(("line", "wanted"), LINES)
def test_line(line, wanted):
    if wanted is CommandError:
        with pytest.raises(CommandError):
            parse_line(line)
    else:
        assert parse_line(line) == wanted


@pytest.mark.parametrize(("line", "told"), MISTAKES)
def test_mistake_is_one_clear_line(line, told):
    with pytest.raises(CommandError) as caught:
        parse_line(line)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spelling", options.spellings(valued=True))
def test_every_option_with_a_value_says_when_it_is_missing(spelling):
    with pytest.raises(CommandError, match="needs a value"):
        parse_line(spelling)


def test_cell():
    body = "first\n\n  -t 5 # kept\n"
    assert parse_cell(" @c -t 0  # note -t 5", body) == Ask(body, branch="c", temperature=0.0)
    assert parse_cell("r <<", "x") == Ask("x", output="r")
    assert parse_cell("-h", "") == Help("options")


@pytest.mark.parametrize("line", ["status", "what is love?", "@c hello", "-- hello", "-t 0 hello"])
def test_cell_takes_only_options_on_its_first_line(line):
    with pytest.raises(CommandError, match="takes options only"):
        parse_cell(line, "body")


@pytest.mark.parametrize("body", ["", "   ", "\n \t\n"])
def test_blank_cell(body):
    with pytest.raises(CommandError, match="There is no prompt"):
        parse_cell("", body)


def test_filled_replaces_once_and_converts():
    values = {"{{t}}": "0.25", "{{n}}": "12", "a {{x}}": "a {{t}}", "{{s}}": "sys"}
    ask = Ask("a {{x}}", temperature="{{t}}", max_tokens="{{n}}", system="{{s}}", stop=("{{n}}",))
    done = ask.filled(lambda text: values[text])
    assert done == Ask("a {{t}}", temperature=0.25, max_tokens=12, system="sys", stop=("12",))


def test_filled_says_what_a_number_needs():
    with pytest.raises(CommandError, match="temperature takes a number, not 'hot'"):
        Ask("x", temperature="{{t}}").filled(lambda text: "hot" if text == "{{t}}" else text)


def test_literal_fills_nothing():
    ask = Ask("{{x}}", literal=True)
    assert ask.filled(lambda _: "no") == ask


def test_help_is_generated_from_the_parser():
    overview, listed = options.help_text(), options.help_text("options")
    assert all(name in overview for name in options.SUBCOMMANDS)
    assert all(topic in overview for topic in options.TOPICS)
    assert all(spelling in listed for spelling in options.spellings())
    assert "--branch" not in listed
    assert all(options.help_text(topic) for topic in (*options.TOPICS, *options.SUBCOMMANDS))
