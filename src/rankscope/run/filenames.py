"""What the files and folders of a trace and of a host's run are called, and what progress is told
to.
"""

from __future__ import annotations

from collections.abc import Callable

# ------------------------------------------------------------------ the trace folder
TRACE_NAME = "trace.json"
TREE_NAME = "tree.json"
"""The tree for people and programs that read JSON; rankscope reads the step files."""
VALUES_NAME = "values.safetensors"
"""In a trace of format 1: the statistics of all steps."""
STEPS_FOLDER = "steps"
"""Folder of the step files, each with the columns of some whole steps."""
INDEX_NAME = "index.jsonl"
"""In the folder of step files, while the job runs: which steps are written."""
INDEX_FORMAT = "rankscope.index/2"
TENSOR_FOLDER = "tensors"
"""Folder of the chunks of full tensors, in a trace folder or in a run folder."""
COLLECTOR_LOCK_NAME = "collector.lock"
COLLECTOR_LOG_NAME = "collector.log"
STALL_FOLDER = "stalls"
"""Folder of relays' reports on a job that stands still, in trace and run folders."""
TRACE_FORMAT = "rankscope.trace/3"
TREE_FORMAT = "rankscope.tree/1"
STEPS_FORMAT = "rankscope.steps/1"
FINDINGS_NAME = "findings.jsonl"
FINDINGS_FORMAT = "rankscope.finding/1"
PARQUET_FOLDER = "parquet"
"""Folder of the dataset of `--rs-parquet`, written while the job runs."""

REPLICA_FOLDER = "spool"
"""Folder of the replicas inside a trace folder: `rank00003.0.cells`, its end marker
`rank00003.0.json`, and the files named below."""
CELLS_SUFFIX = ".cells"
SETTLED_SUFFIX = ".settled"
"""Suffix of the file that stands for the begin of a replica, beside it (`spool.replicas`)."""
RUN_ID_NAME = "run-id"
RUN_MARK_PREFIX = "run-"
"""Prefix of the mark by which other hosts recognise the head's folder."""
HOST_STATE_PREFIX = "host-"
"""Prefix of the states that relays of a shared folder write."""
STATUS_NAME = "status.json"
"""In the folder of replicas: where the ranks of a running job are. Removed with the trace's end."""
STATUS_FORMAT = "rankscope.status/1"
JOB_END_NAME = "job-end"
"""In the folder of replicas: how the job ended, as its launcher saw it."""
VANISHED_NAME = "vanished"
"""In the folder of replicas: a host of a job that holds its steps back vanished without an end."""

# ------------------------------------------------------------------ the run folder of a host
RUN_NAME = "run.json"
COMPANION_LOCK_NAME = "companion.lock"
COMPANION_LOG_NAME = "companion.log"
"""Log of a companion that gathers nothing; a gathering one logs to the trace folder."""
JOB_OVER_NAME = "job-over"
LAUNCHER_LOCK_NAME = "launcher.lock"
START_LOCK_NAME = "start.lock"
REACHED_NAME = "reached"
"""Progress of ranks that opened no spool: lines for the launcher."""
COMPANION_STARTED_NAME = "companion.started"
"""Names the companion that a rank started last, before it holds its lock."""
STEP_TRIGGER_FOLDER = "step-trigger"
"""Folder `step-trigger.<life>` in which ranks agree on a step (`agent.steps.chosen`); in the folder
of replicas if all hosts see it."""
HELD_FOLDER = "held"
"""Folder of the streams that ranks hold back (`--rs-steps last:N`), one folder a stream."""
KEPT_FOLDER = "kept"
EVENT_FOLDER = "events"
"""Folder `events.<life>` of events (`run.agreements`), beside the step-trigger folders."""
ORDER_NAME = "order.json"
"""Last order of `rankscope capture`, in the folder of replicas and in run folders."""
ORDER_SEEN_PREFIX = "order-"
"""Prefix of relays' answers to an order, beside it in the folder of replicas."""
ORDER_FOLDER = "orders"
"""Folder `orders.<life>` in which ranks agree on an order's first step, beside the answers."""
STREAM_LOCK_NAME = "lock"
"""In the folder of a stream: locked by the rank that writes the stream."""

OF_A_COLLECTOR = frozenset(
    {
        *(REPLICA_FOLDER, COLLECTOR_LOCK_NAME, COLLECTOR_LOG_NAME, TENSOR_FOLDER, STALL_FOLDER),
        *(FINDINGS_NAME, STEPS_FOLDER, PARQUET_FOLDER, RUN_NAME),
    }
)
"""Files of a trace folder that exist until its tree does."""
OF_A_RUN = (
    *(RUN_NAME, JOB_OVER_NAME, LAUNCHER_LOCK_NAME, START_LOCK_NAME, COMPANION_LOG_NAME),
    *(COMPANION_LOCK_NAME, COMPANION_STARTED_NAME, ORDER_NAME, REACHED_NAME),
)
"""Files that are removed with a run folder."""

Progress = Callable[[str, float], None]
"""Called with the work in progress, and the part of it that is done (0 to 1)."""
