"""`torchrun --logs-specs rankscope`: tracing where a template owns the command line.

torchrun asks a logs-specs class, just before it starts the ranks of a host, where their output
goes. This one answers as torchrun's own does, and prepares the trace on the way: only then are the
world size and this host's place in the job known.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest

from rankscope.agent.guard import attempt
from rankscope.run.messages import say
from rankscope.settings import as_variables, is_enabled, misspelt_variables, settings_from
from rankscope_launcher.job import JobShape, TracedJob, new_run_id, train_untraced

__all__ = ["RankscopeLogsSpecs"]


class RankscopeLogsSpecs(DefaultLogsSpecs):
    """torchrun's own log files, and a trace of the job they belong to."""

    _is_prepared = False

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Prepare the trace before the first start of the ranks; restarts go on in the same one."""
        if not self._is_prepared and envs:
            self._is_prepared = True
            error = attempt(_start, envs[0])
            if error is not None:
                train_untraced(error, as_variables)
        return super().reify(envs)


def _start(worker: Mapping[str, str]) -> None:
    misspelt = misspelt_variables()
    if misspelt and not is_enabled():  # else this process said it when it imported torch
        say(misspelt)
    job = TracedJob(settings_from(), _shape(worker))
    # torchrun raises when a rank fails; its traceback is printed before this runs
    atexit.register(lambda: job.close(error=getattr(sys, "last_value", None)))


def _shape(worker: Mapping[str, str]) -> JobShape:
    hosts = int(worker.get("GROUP_WORLD_SIZE", "1"))
    run_id = worker.get("TORCHELASTIC_RUN_ID", "")
    return JobShape(
        run_id=run_id if hosts > 1 and run_id else new_run_id(),
        hosts=hosts,
        local_ranks=int(worker.get("LOCAL_WORLD_SIZE", "1")),
        is_head=worker.get("GROUP_RANK", "0") == "0",
    )
