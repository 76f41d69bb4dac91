"""What every test gets: one thread, the sources on every process's path, and real ranks."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LAB = REPOSITORY / "tests" / "lab"

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONUNBUFFERED", None)  # programs end otherwise where their output has no room
# Two hundred files of tests, and the sources in each process, would be compiled again in every run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        *(str(REPOSITORY / part) for part in ("src", "launcher", ".")),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)
for _variable in [name for name in os.environ if name.startswith(("RANKSCOPE", "PET_"))]:
    if _variable not in {"RANKSCOPE_VENV", "RANKSCOPE_TORCH", "RANKSCOPE_SCREENSHOTS"}:
        del os.environ[_variable]

from tests.distributed.pool import RankPool  # noqa: E402  # the environment above is for its processes too


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option that asks for the laboratory."""
    parser.addoption("--lab", action="store_true", help="run the tests of tests/lab, and no others")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the laboratory out unless `--lab` or a path asks for it."""
    if collection_path != LAB or config.getoption("lab") or _names_lab(config):
        return None
    return True


def _names_lab(config: pytest.Config) -> bool:
    """True where a path on pytest's command line is the laboratory, or lies in it."""
    paths = [config.invocation_params.dir / str(word).partition("::")[0] for word in config.args]
    return any(LAB in (path.resolve(), *path.resolve().parents) for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    """Have what tests start obey signals that this run was started to ignore (`nohup`, `&`).

    Programs inherit that a signal is ignored, but no handler: torchrun would wait half a minute for
    ranks that no Ctrl-C ends. pytest itself goes on ignoring them.
    """
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it only starts the workers
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the laboratory, and those that stay together in one of several workers.

    Tests that use ranks: a worker has one pool of them. They are most of the work, so those of the
    two tables of whole programs are a group of their own, as are those on the late accelerator,
    which have a pool of their own. Tests of `compat`: one worker imports
    transformers, which takes seconds. Tests of `page`: one worker starts browsers. Any other file:
    what its tests share is made once.
    """
    if LAB in item.path.parents:
        item.add_marker(pytest.mark.lab)
    if "ranks" in getattr(item, "fixturenames", ()):
        group = "programs" if item.path.parent.name in {"real", "faults"} else "ranks"
    elif "late_ranks" in getattr(item, "fixturenames", ()):
        group = "late"
    elif item.path.parent.name in {"compat", "page"}:
        group = item.path.parent.name
    elif item.get_closest_marker("xdist_group") or item.get_closest_marker("launch"):
        return
    else:
        group = item.path.stem
    item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose between suite and laboratory, and have the groups that take longest begin first.

    A row of a table that proves nothing new to a user is marked `lab` as well, where it stands.

    Tests that start jobs stay single where they may: they are left for the end, when both workers
    should have something to do.
    """
    wants_lab = config.getoption("lab")
    others = [
        item
        for item in items
        if (item.get_closest_marker("lab") is not None) != wants_lab
        and (wants_lab or LAB not in item.path.parents)
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = {*others}
        items[:] = [item for item in items if item not in left_out]
    if not hasattr(config, "workerinput"):
        return
    work: Counter[str] = Counter()
    for item in items:
        work[_group_of(item)] += _work_of(item)
    items.sort(key=lambda item: -work[_group_of(item)])


def pytest_collection_finish() -> None:
    """Take what all tests have imported out of the garbage collector's way.

    Many tests collect garbage to see what stays. Each of these would walk half a million objects
    of torch, of transformers and of the tests themselves, none of which can go.
    """
    gc.collect()
    gc.freeze()


def _group_of(item: pytest.Item) -> str:
    """Return what the tests that stay together have in common."""
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid if mark is None else str(mark.args[0])


def _work_of(item: pytest.Item) -> int:
    """Return about how many times as long a test takes as one that starts no process."""
    if item.get_closest_marker("launch") or item.get_closest_marker("slow"):
        return 30
    return 5 if {"ranks", "late_ranks"} & {*getattr(item, "fixturenames", ())} else 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what wants an accelerator where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip what torch itself does wrong."""
    return (yield from _skipping_own_defects())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    """The same for what several tests share."""
    return (yield from _skipping_own_defects())


def _skipping_own_defects() -> Generator[None, object, object]:
    try:
        return (yield)
    except AssertionError as error:
        from tests.torches import own_defect  # loads torch

        if why := own_defect(error):
            pytest.skip(why)
        raise


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four gloo ranks: `ranks.run(fn, *args, world_size=4, env=None)`, results by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def late_ranks() -> Iterator[RankPool]:
    """Up to two ranks of their own for `tests.lab.lateaccelerator`, which a process never loses."""
    from tests.lab.lateaccelerator import why_not

    if (reason := why_not()) is not None:
        pytest.skip(reason)
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Top of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def python() -> str:
    """The Python that runs the tests."""
    return sys.executable
