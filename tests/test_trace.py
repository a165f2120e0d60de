from __future__ import annotations

import gzip
import json
import os
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_jupyter.cache.trace import OWNERS, TraceWriter, read

ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
kinds = st.sampled_from(["system", "turn", "prompt", "answer"])
requests = st.lists(
    st.tuples(
        ids,
        ids,
        st.sampled_from([None, "@a", "@b", "cell 1"]),
        st.lists(st.tuples(st.integers(1, 50), kinds), max_size=3),
    ),
    max_size=8,
)


def write(path, made) -> None:
    with TraceWriter(path) as writer:
        for prompt, generated, owner, marks in made:
            writer.request(prompt, generated, owner, marks)


@given(made=requests)
def test_what_was_written_is_read(made, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write(path, made)
    steps = read(path)
    numbers: dict[str, int] = {}
    assert len(steps) == len(made)
    for step, (prompt, generated, owner, marks) in zip(steps, made, strict=True):
        assert step.ids.tolist() == prompt
        assert step.generated.tolist() == generated
        assert step.ids.dtype == step.generated.dtype == np.int32
        number = None if owner is None else numbers.setdefault(owner, len(numbers))
        assert step.owner == number
        assert step.marks == tuple(marks)


def test_a_growing_conversation_is_written_once(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    history: list[int] = []
    made = []
    for turn in range(50):
        history = [*history, *range(1000 * turn, 1000 * turn + 100)]
        made.append((history, [7, 8], "@a", ()))
        history = [*history, 7, 8]
    write(path, made)
    lines = path.read_text().splitlines()
    assert max(len(json.loads(line).get("ids", ())) for line in lines) == 100
    assert [s.ids.tolist() for s in read(path)] == [m[0] for m in made]


def test_more_owners_than_are_remembered(tmp_path) -> None:
    made = [([i % (OWNERS + 20), 1, 2], [3], f"@{i % (OWNERS + 20)}", ()) for i in range(900)]
    write(tmp_path / "t.jsonl", made)
    assert [s.ids.tolist() for s in read(tmp_path / "t.jsonl")] == [m[0] for m in made]


def test_no_text_gets_in_and_only_its_user_can_read_it(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    path.chmod(0o644)
    write(path, [([1, 2], [3], "@my secret plan", [(1, "system")])])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" not in path.read_text()
    assert "old" not in path.read_text()


def test_gzipped(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [([1, 2], [3], None, ())])
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed)[0].ids.tolist() == [1, 2]


def test_a_record_that_was_cut_short_ends_the_trace(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [([1, 2], [3], "@a", ())] * 3)
    text = path.read_text()
    path.write_text(text[: text.rindex("generated")])
    assert len(read(path)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"owner":0}',
        '{"owner":0,"keep":9,"ids":[1],"generated":[],"marks":[]}',
        '{"owner":0,"keep":-1,"ids":[1],"generated":[],"marks":[]}',
        '{"owner":0,"keep":0,"ids":["x"],"generated":[],"marks":[]}',
        '{"owner":0,"keep":0,"ids":[99999999999],"generated":[],"marks":[]}',
        '{"owner":0,"keep":0,"ids":[1],"generated":[],"marks":[[1,"nonsense"]]}',
    ],
)
def test_a_damaged_trace_is_told(tmp_path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [([1, 2], [3], "@a", ())] * 2)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, lines[2], ""]))
    with pytest.raises(ValueError, match="Line 3 of the trace"):
        read(path)


@pytest.mark.parametrize(
    "text", ["", "hello", '{"format":"other"}', '{"format":"mlx-jupyter trace","version":9}']
)
def test_what_is_no_trace_is_told(tmp_path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        read(path)


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, caplog) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    writer._file.close()
    writer._file = open("/dev/full", "w")  # noqa: SIM115 - the writer closes it
    writer.request([1], [2], "@a")
    writer.request([1], [2], "@a")
    writer.close()
    assert "can't be written" in caplog.text
