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
"""In a trace of format 1: the numbers of all steps."""
STEPS_FOLDER = "steps"
"""Folder of the step files: whole steps as columns, some in each file."""
INDEX_NAME = "index.jsonl"
"""In that folder, while the job runs: which steps are written."""
INDEX_FORMAT = "rankscope.index/2"
TENSOR_FOLDER = "tensors"
"""Folder of the chunks of full tensors, in a trace folder or in a run folder."""
COLLECTOR_LOCK_NAME = "collector.lock"
COLLECTOR_LOG_NAME = "collector.log"
STALL_FOLDER = "stalls"
"""Folder of what relays said of a job that stands still, in a trace folder and in a run folder."""
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
"""Ends the name of what stands for the begin of a replica, beside it (`spool.replicas`)."""
RUN_ID_NAME = "run-id"
RUN_MARK_PREFIX = "run-"
"""Begins the name of the mark by which other hosts see that this folder is the head's."""
HOST_STATE_PREFIX = "host-"
"""Begins the names of what the relays of a shared folder say of themselves."""
STATUS_NAME = "status.json"
"""There too: where the ranks of a running job are; gone once the trace is finished."""
STATUS_FORMAT = "rankscope.status/1"
JOB_END_NAME = "job-end"
"""There too: how the job ended, as its launcher saw it."""
VANISHED_NAME = "vanished"
"""There too: a host of a job that holds its steps back is gone without a word."""

# ------------------------------------------------------------------ the run folder of a host
RUN_NAME = "run.json"
COMPANION_LOCK_NAME = "companion.lock"
COMPANION_LOG_NAME = "companion.log"
"""Of a companion that gathers nothing; one that does has its log in the trace folder."""
JOB_OVER_NAME = "job-over"
LAUNCHER_LOCK_NAME = "launcher.lock"
START_LOCK_NAME = "start.lock"
REACHED_NAME = "reached"
"""How far ranks came that opened no spool: lines for the launcher."""
COMPANION_STARTED_NAME = "companion.started"
"""Names the companion that a rank started last: it takes its lock later."""
STEP_TRIGGER_FOLDER = "step-trigger"
"""Folder `step-trigger.<life>` in which ranks agree on a step (`agent.steps.chosen`); in the
folder of replicas where all hosts see that."""
HELD_FOLDER = "held"
"""Folder of the streams that ranks hold back (`--rs-steps last:N`), each a folder as elsewhere."""
KEPT_FOLDER = "kept"
EVENT_FOLDER = "events"
"""Folder `events.<life>` of what happened (`run.agreements`), beside the folders of the former."""
ORDER_NAME = "order.json"
"""The last order of `rankscope capture`, in the folder of replicas and in run folders."""
ORDER_SEEN_PREFIX = "order-"
"""Begins the names of what relays say of an order, beside it in the folder of replicas."""
ORDER_FOLDER = "orders"
"""Folder `orders.<life>` in which ranks agree on the first step of an order, beside those words."""
STREAM_LOCK_NAME = "lock"
"""In the folder of a stream, held by the rank that writes it."""

OF_A_COLLECTOR = frozenset(
    {
        *(REPLICA_FOLDER, COLLECTOR_LOCK_NAME, COLLECTOR_LOG_NAME, TENSOR_FOLDER, STALL_FOLDER),
        *(FINDINGS_NAME, STEPS_FOLDER, PARQUET_FOLDER, RUN_NAME),
    }
)
"""What is in a trace folder as long as its tree is not."""
OF_A_RUN = (
    *(RUN_NAME, JOB_OVER_NAME, LAUNCHER_LOCK_NAME, START_LOCK_NAME, COMPANION_LOG_NAME),
    *(COMPANION_LOCK_NAME, COMPANION_STARTED_NAME, ORDER_NAME, REACHED_NAME),
)
"""Files of a run folder that go with it."""

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of it (0 to 1)."""
