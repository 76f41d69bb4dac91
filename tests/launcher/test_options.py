"""What `rankscope run` refuses before a job starts: one line, exit 2, nothing on stdout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.errors import SettingError
from rankscope.settings import SETTINGS
from rankscope_launcher import runcommand
from tests import forked

WRAPPER = "import sys; from rankscope_launcher.runcommand import main; main(sys.argv[1:])"


@pytest.fixture(autouse=True)
def _script(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is there: one that is not is refused before anything else."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "a.py").touch()
    monkeypatch.chdir(folder)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-c", WRAPPER, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
    )


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that `rankscope run` with these arguments says."""
    with pytest.raises(SystemExit) as left:
        runcommand.main(arguments)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rankscope run: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rs-ou", "x", "a.py"], "--rs-out in full"),
        (["--rs-spoool", "x", "a.py"], "did you mean --rs-spool"),
        (["--rs-steps", "3-1", "a.py"], "write 1-3"),
        (["--rs-steps"], "--rs-steps wants a value, STEPS"),
        (["--rs-steps", "--nnodes", "1", "a.py"], "--rs-steps wants a value"),
        (["a.py", "--rs-out", "x"], "put it before: rankscope run --rs-out"),
        (["--nproc-per-node", "2", "a.py", "--lr", "1", "--rs-keep-spool"], "put it before"),
        (["--no-such-option", "a.py"], "unrecognized arguments: --no-such-option"),
        (["--steps", "3", "a.py"], "did you mean --rs-steps?"),
        (["--rs_steps", "3", "a.py"], "did you mean --rs-steps?"),
        (["--nproc-per-nodee", "2", "a.py"], "did you mean --nproc-per-node?"),
        ([], "required: training_script"),
        (["--nproc-per-node", "many", "a.py"], "nproc_per_node"),
        (["--nnodes", "2", "a.py"], "give every host the same --rs-out"),
        (["--rs-collector", "tcp://10.1.2.3:7", "a.py"], "--rs-collector shared"),
        (["--rs-keys", "nowhere", "--rs-collector", "tcp://h:7", "a.py"], "rankscope keys new"),
        (["--rs-spool-bytes", "1", "a.py"], "64K or more"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert said in refusal(arguments, capsys)


def test_a_variable_that_cannot_be_read_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANKSCOPE_BATCH_DIM", "first")
    assert "RANKSCOPE_BATCH_DIM: 'first' is not a whole number" in refusal(["a.py"], capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('axes = "tp=3"', "axes tp=3 are those of 3 ranks, the run had 2"),
        ("axes = ", "is not TOML"),
        ("axes = 2", 'write axes = "dp=1,tp=2"'),
    ],
)
def test_a_layout_file_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
):
    file = tmp_path / "layout.toml"
    file.write_text(text)
    words = ["--rs-layout", str(file), "--rs-out", str(tmp_path / "t"), "--nproc-per-node", "2"]
    assert said in refusal([*words, "a.py"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["layout.toml"]


def test_options_are_taken_from_anywhere_before_the_script_in_both_spellings():
    line = runcommand._split(
        ["--rs-steps=all", "--nnodes", "1", "--rs-keep-spool", "--rs-out", "x", "a.py", "--lr", "1"]
    )
    assert line.settings == {"steps": "all", "keep_spool": "1", "out": "x"}
    assert line.torchrun == ["--nnodes", "1", "a.py", "--lr", "1"]


def test_arguments_of_the_script_that_look_like_ours_are_left_alone():
    line = runcommand._split(["a.py", "--rs", "--", "-rs-out"])
    assert line.torchrun == ["a.py", "--rs", "--", "-rs-out"]


def test_torchruns_abbreviations_and_variables_still_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    parsed = runcommand._parse(
        runcommand._split(["--nproc-per", "4", "-m", "package.module", "--x"])
    )
    assert (parsed.nproc_per_node, parsed.max_restarts, parsed.module) == ("4", 3, True)
    assert parsed.training_script_args == ["--x"]


@pytest.mark.parametrize(
    ("words", "variables", "is_any"),
    [
        ([], {}, True),
        (["--nnodes", "1:1"], {}, True),
        (["--master-port", "29500"], {}, False),
        ([], {"PET_MASTER_PORT": "29500"}, False),
        (["--rdzv-endpoint", "127.0.0.1:29500"], {}, False),
        (["--rdzv-backend", "c10d"], {}, False),
        (["--nnodes", "2"], {}, False),
    ],
)
def test_a_job_of_one_host_that_names_no_rendezvous_takes_any_port(
    words: list[str], variables: dict[str, str], is_any: bool, monkeypatch: pytest.MonkeyPatch
):
    """As torchrun itself does on newer torches; that of 2.8 takes port 29500."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parsed = runcommand._parse(runcommand._split([*words, "a.py"]))
    assert parsed.standalone is is_any
    assert is_any or int(parsed.master_port) == 29500


def test_an_unknown_option_raises_what_the_command_line_catches():
    with pytest.raises(SettingError, match="unrecognized"):
        runcommand._parse(runcommand._split(["--nonsense", "a.py"]))


def test_help_lists_every_setting_and_then_torchruns_options():
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for setting in SETTINGS:
        assert f"--rs-{setting.name}" in done.stdout
    assert done.stdout.index("--rs-out") < done.stdout.index("--nproc-per-node")


def test_a_refused_start_leaves_no_folder_behind(tmp_path: Path):
    done = run("--rs-steps", "x", "--rs-out", str(tmp_path / "trace"), "a.py")
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
