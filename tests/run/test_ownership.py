"""What another user planted where our files come is refused: folders, links, pipes, hard links."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import rankscope
from rankscope.errors import FolderError, SpoolError
from rankscope.run.files import open_own_log, own_subfolder, write_by_rename
from rankscope.run.folders import host_run_folder, spool_base
from rankscope.run.prepare import prepare_out
from rankscope.run.processes import start_daemon

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to a stranger")


@as_root
@pytest.mark.parametrize("is_shared", [False, True])
def test_an_empty_trace_folder_of_another_user_is_refused(is_shared: bool, tmp_path: Path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    folder = tmp_path / "shared" / "trace"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(FolderError, match=f"uid {STRANGER}.*--rs-out"):
        prepare_out(folder, is_shared=is_shared)
    assert list(folder.iterdir()) == []


@as_root
def test_root_takes_a_folder_that_its_owner_alone_could_have_put_there(tmp_path: Path):
    """As one that a user binds into a container."""
    folder = tmp_path / "trace"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    assert prepare_out(folder, is_shared=True) == folder
    assert prepare_out(folder) == folder
    (folder / "spool").symlink_to(tmp_path)
    with pytest.raises(FolderError, match="spool is a link"):
        prepare_out(folder, is_shared=True)


@as_root
def test_a_block_into_a_folder_of_another_user_runs_untraced(tmp_path: Path, capsys):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    folder = tmp_path / "shared" / "trace"
    folder.mkdir(mode=0o777)
    os.chown(folder, STRANGER, STRANGER)
    with rankscope.trace(out=folder) as traced:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert traced.path is None
    assert "belongs to another user" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["spool", "collector.log", "tensors", "steps"])
def test_a_link_in_a_trace_folder_that_others_began_is_not_followed(name: str, tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / name).symlink_to(precious)
    with pytest.raises(FolderError, match=f"{name} is a link"):
        prepare_out(tmp_path / "trace", is_shared=True)
    assert list(precious.iterdir()) == []


def test_a_folder_of_this_user_with_what_other_hosts_began_is_taken(tmp_path: Path):
    folder = tmp_path / "trace"
    (folder / "spool").mkdir(parents=True)
    (folder / "collector.log").write_text("begun\n")
    (tmp_path / "link").symlink_to(folder)
    assert prepare_out(folder, is_shared=True) == folder
    assert prepare_out(tmp_path / "link", is_shared=True) == tmp_path / "link"


@pytest.mark.parametrize("planted", ["link", "second name", "pipe", "stranger"])
def test_a_daemon_whose_log_was_planted_is_not_started(planted: str, tmp_path: Path):
    precious, log = tmp_path / "precious", tmp_path / "collector.log"
    precious.write_text("as it was")
    if planted == "link":
        log.symlink_to(precious)
    elif planted == "second name":
        os.link(precious, log)
    elif planted == "pipe":
        os.mkfifo(log)
    elif os.geteuid() == 0:
        log.touch()
        os.chown(log, STRANGER, STRANGER)
    else:
        pytest.skip("only root can give a file to a stranger")
    ran = tmp_path / "ran"
    with pytest.raises(SpoolError, match=r"cannot be started.*collector\.log"):
        start_daemon(["touch", str(ran)], log, tmp_path)
    assert precious.read_text() == "as it was"
    assert not ran.exists()


def test_a_daemon_writes_both_streams_behind_what_its_log_holds(tmp_path: Path):
    log = tmp_path / "collector.log"
    log.write_text("before\n")
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True)"
    start_daemon([sys.executable, "-S", "-c", code], log, tmp_path)
    deadline = time.monotonic() + 60
    while "err" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.read_text() == "before\nout\nerr\n"


def test_a_sub_folder_is_made_or_taken_and_a_link_refused(tmp_path: Path):
    made = own_subfolder(tmp_path / "spool")
    assert made == own_subfolder(made)
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(OSError, match="is a link"):
        own_subfolder(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(made, STRANGER, STRANGER)
        with pytest.raises(OSError, match="another user"):
            own_subfolder(made)


def test_a_log_is_for_this_user_alone(tmp_path: Path):
    os.close(open_own_log(tmp_path / "log"))
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_planted_draft_is_removed_and_not_written_into(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    draft = tmp_path / f".run.json.{os.getpid()}.new"
    os.link(precious, draft)
    write_by_rename(tmp_path / "run.json", "ours")
    assert (precious.read_text(), (tmp_path / "run.json").read_text()) == ("as it was", "ours")
    assert not draft.exists()


@pytest.mark.parametrize("planted", ["open to others", "link", "stranger"])
def test_a_socket_folder_in_the_temporary_directory_is_checked(
    planted: str, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's path is short
        _plant_and_ask(planted, Path(short), monkeypatch)


def _plant_and_ask(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = spool_base(None)
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "elsewhere")
    else:
        base.mkdir(mode=0o777 if planted == "open to others" else 0o700)
        base.chmod(0o777 if planted == "open to others" else 0o700)
    if planted == "stranger":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to a stranger")
        os.chown(base, STRANGER, STRANGER)
    with pytest.raises(SpoolError, match="belongs to another user, is a link or is open to others"):
        host_run_folder(base, "run")
