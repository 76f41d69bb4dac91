"""`rankscope doctor`: what is really broken it names, that and nothing else, and what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import rankscope
from rankscope.companion.collector import Intake
from rankscope.companion.curve import new_keys
from rankscope.doctor.job import Condition, Question, Status, interpreter_conditions, job_conditions
from rankscope.run.connection import read_keys, relays_file, write_keys
from rankscope.run.files import mount_of
from tests.keyed import key_file
from tests.launcher.launches import rankscope as command

PLAIN = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
SOURCES = [str(Path(rankscope.__file__).parents[1]), str(Path(__file__).parents[2] / "launcher")]
TORCH = str(Path(sys.prefix) / f"lib/python3.{sys.version_info.minor}/site-packages")


def wrong(conditions: Iterable[Condition], *but: str) -> dict[str, Condition]:
    """Return what does not simply hold; `but`: what of this machine is not asked about."""
    found = list(conditions)
    assert all(c.remedy for c in found if c.status in (Status.FAILED, Status.NOTE)), found
    cannot = {c.name for c in found if c.status is Status.SKIPPED}
    return {c.name: c for c in found if c.status is not Status.OK and c.name not in {*but, *cannot}}


def asked(tmp_path: Path, environ: dict[str, str] | None = None, **settings: str) -> dict:
    """Ask about a job whose spools and trace are to lie in a folder of the test."""
    place = {"spool": str(tmp_path / "spools"), "out": str(tmp_path / "trace"), "spool_bytes": "1M"}
    question = Question(settings=place | settings, local_ranks=2)
    found = wrong(job_conditions(question, PLAIN | (environ or {})), "kernel")
    assert not (tmp_path / "trace" / "sample").exists()
    return found


def names(conditions: dict[str, Condition], name: str, words: str) -> None:
    assert list(conditions) == [name], conditions
    assert conditions[name].status is Status.FAILED
    assert words in f"{conditions[name].answer} {conditions[name].remedy}", conditions[name]


def test_where_all_is_well_nothing_is_named_and_nothing_stays_behind(tmp_path: Path) -> None:
    assert asked(tmp_path) == {}
    assert not (tmp_path / "trace").exists()
    assert list((tmp_path / "spools").rglob("*")) == []


@pytest.mark.parametrize(
    ("environ", "name", "words"),
    [
        ({"RANKSCOPE_STEP": "1"}, "variables", "did you mean RANKSCOPE_STEPS?"),
        ({"RANKSCOP": "1"}, "variables", "did you mean RANKSCOPE?"),
        ({"RANKSCOPE_STEPS": "often"}, "settings", "RANKSCOPE_STEPS"),
        ({"RANKSCOPE_RANKS": "7"}, "settings", "none of the 2 ranks"),
        ({"RANK": "1"}, "ranks", "RANK=1 without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "ranks", "unset WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "ranks", "is not a rank"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "ranks", "is not a rank"),
        ({"RANKSCOPE_COLLECTOR": "tcp://127.0.0.1:1"}, "collector", "rankscope keys new FILE"),
        ({"RANKSCOPE_COLLECTOR": "tcp://192.0.2.1:7777"}, "collector", "give another --collector"),
        ({"RANKSCOPE_COLLECTOR": "ipc://relative"}, "collector", "absolute path"),
        ({"RANKSCOPE_COLLECTOR": "ipc:///" + "x" * 200}, "collector", "107"),
        ({"RANKSCOPE_COLLECTOR": "ipc:///nowhere/at.all"}, "collector", "does not answer"),
    ],
)
def test_what_the_environment_says_wrong_is_named(tmp_path: Path, environ, name, words) -> None:
    names(asked(tmp_path, environ), name, words)


def test_a_collector_that_listens_is_reached_and_its_keys_are_tried(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert asked(tmp_path, collector=f"ipc://{path}") == {}
    ours, theirs = read_keys(key_file(), is_collector=True), new_keys()
    write_keys(tmp_path / "other", theirs)
    write_keys(tmp_path / "half", replace(theirs, collector_public=ours.collector_public))
    intake = Intake(tmp_path / "out", ["tcp://127.0.0.1:*"], world_size=1, keys=ours)
    try:
        (address,) = intake.addresses
        keys = {"keys": str(relays_file(key_file()))}
        assert asked(tmp_path, collector=address, **keys) == {}
        found = asked(tmp_path, collector=address, keys=str(tmp_path / "other.relay"))
        names(found, "collector", "has other keys, or none")
        found = asked(tmp_path, collector=address, keys=str(tmp_path / "half.relay"))
        names(found, "collector", "does not know the relay key")
        found = asked(tmp_path, collector=address, keys=str(tmp_path / "other"))
        names(found, "collector", "not the secret key of the relays")
    finally:
        intake.close()
    with socket.create_server(("127.0.0.1", 0)) as server:  # speaks no ZeroMQ
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        names(asked(tmp_path, collector=address, **keys), "collector", "no answer")


def test_a_trace_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    assert asked(tmp_path, out=str(tmp_path / "full")) == {}  # a run takes a sibling
    names(asked(tmp_path, out=str(tmp_path / "file")), "trace folder", "is a file")
    names(asked(tmp_path, out=str(tmp_path / "file" / "below")), "trace folder", "--out")
    names(asked(tmp_path, out="/proc/nothing/here"), "trace folder", "--out")
    assert (tmp_path / "full" / "something").exists()


def test_several_hosts_need_a_trace_folder_that_all_of_them_see(tmp_path: Path) -> None:
    settings = {"spool": str(tmp_path), "spool_bytes": "1M"}
    found = wrong(job_conditions(Question(settings=settings, hosts=2), PLAIN), "kernel")
    names(found, "trace folder", "the same on every host")
    settings["out"] = str(tmp_path / "trace")
    found = wrong(job_conditions(Question(settings=settings, hosts=2), PLAIN), "kernel")
    assert list(found) == ["trace folder"] and found["trace folder"].status is Status.NOTE


def test_a_spool_folder_that_cannot_be_made_or_is_open_to_others_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    names(asked(tmp_path, spool=str(tmp_path / "file")), "spool folder", "--spool")
    names(asked(tmp_path, spool="/proc/nothing"), "spool folder", "--spool")
    found = asked(tmp_path, spool="/proc")["spool folder"]
    assert "RANKSCOPE_" not in f"{found.answer} {found.remedy}", "it was asked with --spool"
    (tmp_path / "open" / f"rankscope-{os.getuid()}").mkdir(parents=True, mode=0o755)
    names(asked(tmp_path, spool=str(tmp_path / "open")), "spool folder", "open to others")


def test_what_is_wrong_is_said_whole_whatever_the_folder_is_called(tmp_path: Path) -> None:
    """The library's own remedy is left out, which names an option that was not given here."""
    odd = tmp_path / "a;b"
    found = asked(tmp_path, spool=str(odd), spool_bytes="900T")["spool space"]
    assert str(odd) in found.answer
    assert "are free (2 x" in found.answer
    assert "--rs-" not in found.answer


def test_a_disk_too_small_for_the_spools_is_named(tmp_path: Path) -> None:
    names(asked(tmp_path, spool_bytes="900T"), "spool space", "--spool-bytes")
    names(asked(tmp_path, spool_bytes="1"), "settings", "64K or more")


MOUNTS = """\
overlay / overlay rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
tmpfs /home/me/fast tmpfs rw 0 0
10.0.0.1@o2ib:/scratch /scratch lustre rw 0 0
me@there:/x /mnt/with\\040space fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_local"),
    [
        ("/nowhere/x", "overlay", True),
        ("/home/me", "nfs4", False),
        ("/home/me/fast/spool", "tmpfs", True),
        ("/scratch/job", "lustre", False),
        ("/mnt/with space/x", "fuse.sshfs", False),
    ],
)
def test_a_disk_of_another_host_is_told_from_this_ones(tmp_path, path, kind, is_local) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    mount = mount_of(Path(path), str(tmp_path / "mounts"))
    assert mount is not None and (mount.kind, mount.is_local) == (kind, is_local)


def test_a_missing_kernel_is_noted_with_what_it_costs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANKSCOPE_KERNEL", "off")
    settings = {"spool": str(tmp_path), "out": str(tmp_path / "t"), "spool_bytes": "1M"}
    found = wrong(job_conditions(Question(settings=settings)))
    assert list(found) == ["kernel"] and found["kernel"].status is Status.NOTE
    assert "three times slower" in found["kernel"].answer


# ---- the ranks' interpreter --------------------------------------------------------------------


def environment(folder: Path, **start_files: str) -> tuple[str]:
    """Make a virtual environment whose site-packages hold these `.pth` files alone."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, text in start_files.items():
        (site / f"{name}.pth").write_text(text + "\n")
    return (str(folder / "bin/python"),)


LINE = (Path(SOURCES[1]) / "rankscope_launcher/rankscope.pth").read_text().strip()
BARE = {name: text for name, text in PLAIN.items() if name != "PYTHONPATH"}


@pytest.mark.lab
def test_an_environment_whose_start_up_file_fires_is_well(tmp_path: Path) -> None:
    python = environment(tmp_path, a="\n".join([*SOURCES, TORCH]), rankscope=LINE)
    assert wrong(interpreter_conditions(python, BARE)) == {}
    assert wrong(interpreter_conditions((*python, "-I"), BARE)) == {}


def test_a_torch_newer_than_all_that_were_tested_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "__version__ = '99.1.0'\nclass cuda: is_available = staticmethod(lambda: False)\n"
    )
    python = environment(tmp_path / "env", a="\n".join([str(tmp_path), *SOURCES, TORCH]))
    found = interpreter_conditions(python, BARE)
    (torch,) = (condition for condition in found if condition.name == "torch")
    assert torch.status is Status.NOTE
    assert "99.1.0" in torch.answer and "nothing is known to be wrong" in torch.answer


def test_a_start_up_file_that_does_not_fire_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path / "half", a=f"{SOURCES[0]}\n{TORCH}", rankscope=LINE)
    names(wrong(interpreter_conditions(python, BARE)), "start-up", "rankscope_launcher")
    python = environment(tmp_path / "hooked", a="\n".join([*SOURCES, TORCH]), rankscope=LINE)
    (site,) = (tmp_path / "hooked").glob("lib/python*/site-packages")
    (site / "zz.pth").write_text("import sys; del sys.meta_path[0]\n")  # takes ours off
    names(wrong(interpreter_conditions(python, BARE)), "start-up", "rankscope.attach()")


def test_a_missing_torch_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path, a="\n".join(SOURCES), rankscope=LINE)
    names(wrong(interpreter_conditions(python, BARE)), "torch", "install torch 2.8 or newer")


# ---- the command -------------------------------------------------------------------------------


def doctor(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    place = ["--spool", str(tmp_path / "spools"), "--out", str(tmp_path / "trace")]
    python = environment(tmp_path / "e", a="\n".join([*SOURCES, TORCH]), rankscope=LINE)
    command = [sys.executable, "-m", "rankscope", "doctor", "--python", python[0], *place, *words]
    return subprocess.run(
        command, env=BARE | {"PYTHONPATH": os.pathsep.join(SOURCES)}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip


def test_json_holds_every_condition_and_the_verdict(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--spool-bytes", "1M", "--json")
    answer = json.loads(done.stdout)
    report = answer["result"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert (answer["format"], answer["command"]) == ("rankscope/1", "doctor")
    assert answer["status"] == "clean" and len(report["conditions"]) == 15
    page = (Path(__file__).parents[2] / "docs/commands/doctor.md").read_text()
    for condition in report["conditions"]:
        assert set(condition) == {"name", "status", "found", "remedy"}
        assert f"| {condition['name']} |" in page, condition["name"]


def test_a_question_that_cannot_be_understood_ends_with_2(tmp_path: Path) -> None:
    assert doctor(tmp_path, "--nproc-per-node", "none").returncode == 2


def test_a_remedy_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = command("doctor", "--out", tmp_path / "file", "--spool", tmp_path)
    lines = done.stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("failed  trace folder"))
    assert lines[at].endswith("give another name with --out")
    assert lines[at + 1].strip() == "-> give another with --out"
