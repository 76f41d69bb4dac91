"""The two ways to a digest: the kernel of this host, and numpy."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from rankscope.capture import kernel


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a kernel built in it."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    cache = tmp_path_factory.mktemp("cache", numbered=True)
    cache.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.fspath(cache))
        patch.delenv("RANKSCOPE_KERNEL", raising=False)
        patch.setattr(tempfile, "tempdir", os.fspath(cache))  # another kernel may lie there
        path = kernel.build()
    assert path is not None
    assert cache in path.parents
    return cache


@pytest.fixture(params=["numpy", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with numpy alone, and again with the kernel."""
    name = str(request.param)
    if name == "numpy":
        monkeypatch.setenv("RANKSCOPE_KERNEL", "off")
        assert kernel.load() is None
    else:
        cache = request.getfixturevalue("kernel_cache")
        monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(cache))
        monkeypatch.delenv("RANKSCOPE_KERNEL", raising=False)
        assert kernel.load() is not None
    return name
