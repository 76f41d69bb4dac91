"""Key files: what they hold, and who may read them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankscope.companion.curve import new_keys
from rankscope.errors import KeysError
from rankscope.run.connection import read_keys, relays_file, write_keys
from tests.launcher.launches import rankscope


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys", new_keys())
    return tmp_path / "keys"


def test_each_side_has_its_own_secret_key_and_nobody_elses(path: Path) -> None:
    ours, theirs = (
        read_keys(path, is_collector=True),
        read_keys(relays_file(path), is_collector=False),
    )
    assert ours.collector_public == theirs.collector_public
    assert ours.relay_public == theirs.relay_public
    assert ours.collector_secret and not ours.relay_secret
    assert theirs.relay_secret and not theirs.collector_secret
    assert theirs.relay_secret not in path.read_text()
    assert ours.collector_secret not in relays_file(path).read_text()
    assert "secret" not in repr(ours) and ours.collector_secret not in repr(ours)
    assert [one.stat().st_mode & 0o777 for one in (path, relays_file(path))] == [0o600] * 2
    with pytest.raises(KeysError, match="has the keys of the relays, and not the secret"):
        read_keys(relays_file(path), is_collector=True)
    with pytest.raises(KeysError, match="has the keys of the collector, and not the secret"):
        read_keys(path, is_collector=False)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_file_that_others_may_read_or_write_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(KeysError, match=f"mode {mode:o}.*chmod 600"):
        read_keys(path, is_collector=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    path.chmod(0o400)
    os.chown(path, 12345, -1)
    with pytest.raises(KeysError, match="user 12345"):
        read_keys(path, is_collector=True)


def test_nothing_is_written_over(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(KeysError, match="exists already"):
        write_keys(path, new_keys())
    assert path.read_bytes() == before
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeysError):
        write_keys(tmp_path / "link", new_keys())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: fields.update(format="rankscope.keys/9"),
        lambda fields: fields.pop("relay"),
        lambda fields: fields["relay"].pop("public"),
        lambda fields: fields["relay"].update(public=7),
        lambda fields: fields["relay"].update(public="short"),
        lambda fields: fields["collector"].update(secret="\n" * 40),
        lambda fields: fields.update(collector=[]),
    ],
)
def test_what_is_no_key_file_is_named(path: Path, damage) -> None:
    fields = json.loads(path.read_text())
    damage(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(KeysError, match="not a key file of format"):
        read_keys(path, is_collector=True)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 4096, b"\xff\xfe", b"null"])
def test_other_files_are_no_key_files(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(KeysError, match="not a key file of format"):
        read_keys(path, is_collector=True)


def test_the_command_makes_both_and_says_whose_each_is(tmp_path: Path) -> None:
    made = rankscope("keys", "new", tmp_path / "keys")
    assert (made.returncode, made.stderr) == (0, "")
    first, second = made.stdout.splitlines()
    assert first.startswith(f"{tmp_path}/keys: ") and "rankscope collect" in first
    assert second.startswith(f"{tmp_path}/keys.relay: ") and "--rs-keys" in second
    assert read_keys(tmp_path / "keys", is_collector=True)
    (tmp_path / "half.relay").touch()
    for words, said in (
        (["new", "keys"], "exists already"),
        (["new", "half"], "half.relay: exists already"),
        (["new", "x" * 250], "cannot be written"),
        (["new", ""], "expected the name of a file"),
        (["old", "x"], "keys new FILE"),
    ):
        refused = rankscope("keys", *words, cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"keys", "keys.relay", "half.relay"}, "no half of a pair"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(KeysError, match="cannot be read: "):
            read_keys(place, is_collector=True)
