"""Finding and interposing a BLAS, with the finder and the loader injected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlx_jupyter import blas


def decide(**changes):
    given = {
        "setting": "",
        "platform": "linux",
        "cuda": lambda: False,
        "imported": False,
        "find": lambda: iter(["a.so", "b.so"]),
        "load": lambda name: name == "b.so",
    }
    return blas.decide(**{**given, **changes})


def test_first_loadable_candidate_is_taken():
    assert decide() == blas.BlasStatus("interposed", "b.so")


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"platform": "darwin"}, "not needed"),
        ({"cuda": lambda: True}, "not needed"),
        ({"setting": "off"}, "off"),
        ({"imported": True}, "too late"),
        ({"load": lambda name: False}, "none"),
        ({"setting": "/no/such.so"}, "none"),
    ],
)
def test_states(changes, state):
    assert decide(**changes).state == state


def test_every_state_without_a_blas_says_what_to_do_in_one_line():
    for changes in ({"load": lambda name: False}, {"imported": True}, {"setting": "/no/such.so"}):
        hint = decide(**changes).hint
        assert hint
        assert "\n" not in hint
    assert "/no/such.so" in decide(setting="/no/such.so").hint


def test_the_setting_wins_over_the_search_and_over_cuda():
    done = decide(setting="mine.so", cuda=lambda: True, load=lambda name: name == "mine.so")
    assert done == blas.BlasStatus("interposed", "mine.so")


def test_an_off_switch_loads_nothing():
    def load(name):
        raise AssertionError(name)

    assert decide(setting="OFF", load=load).state == "off"


def test_candidates_come_from_the_environment_then_the_linker_then_the_system(tmp_path):
    lib = tmp_path / "lib"
    (lib / "x86_64-linux-gnu" / "openblas-pthread").mkdir(parents=True)
    for name in ("libmkl_rt.so.2", "x86_64-linux-gnu/openblas-pthread/libopenblas.so.0"):
        (lib / name).touch()
    found = list(blas.candidates([tmp_path], ["libopenblas.so.0"]))
    assert found == [
        str(lib / "libmkl_rt.so.2"),
        str(lib / "x86_64-linux-gnu/openblas-pthread/libopenblas.so.0"),
        "libopenblas.so.0",
    ]


def test_a_file_that_is_no_library_and_a_library_that_is_no_blas_are_refused(tmp_path):
    junk = tmp_path / "libopenblas.so.0"
    junk.write_bytes(b"\x7fELF junk")
    assert not blas.open_library(str(junk))
    if sys.platform == "linux":
        assert not blas.open_library("libc.so.6")


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=True,
    )


def test_ensure_is_idempotent_and_imports_no_mlx():
    code = (
        "import sys; from mlx_jupyter import blas\n"
        "first = blas.ensure(); assert blas.ensure() is first is blas.status()\n"
        "assert 'mlx.core' not in sys.modules"
    )
    run(code, MLX_JUPYTER_BLAS="off")


@pytest.mark.skipif(sys.platform != "linux", reason="MLX's CPU BLAS is Linux's")
def test_mlx_really_calls_the_interposed_library():
    code = (
        "from mlx_jupyter import blas; import sys\n"
        "if blas.ensure().state != 'interposed': print('none'); sys.exit()\n"
        "import mlx.core as mx\n"
        "a = mx.ones((64, 64)); mx.eval(a @ a); mx.synchronize()"
    )
    done = run(code, MLX_JUPYTER_BLAS="", LD_DEBUG="bindings")
    if "none" in done.stdout:
        pytest.skip("no BLAS on this machine, or none needed")
    bound = [
        line for line in done.stderr.splitlines() if "libmlx.so" in line and "cblas_sgemm'" in line
    ]
    assert bound, "libmlx never bound cblas_sgemm"
    target = bound[0].split(" to ")[1]
    assert "mlx_cpu.libs" not in target
    assert any(name in target for name in ("openblas", "mkl", "blis"))
