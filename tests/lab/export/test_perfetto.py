"""The Perfetto archive, opened in Perfetto's trace_processor."""

from __future__ import annotations

from tests.export.conftest import call_rows, exported
from tests.lab.export.traceprocessor import opened


def test_trace_processor_merges_all_ranks_and_counts_right_by_sql(trace, tmp_path):
    exported(trace, "perfetto", tmp_path / "out.zip")
    with opened(tmp_path / "out.zip") as processor:

        def sql(query):
            return [tuple(row.__dict__.values()) for row in processor.query(query)]

        calls, lives = call_rows(trace), len(trace.run["ranks"])
        assert sql("select count(*) from process where name glob 'rank *'") == [(lives,)]
        query = (
            "select extract_arg(slice.arg_set_id, 'debug.node') as node, "
            "cast(substr(process.name, 6) as int) as rank, ts, slice.dur "
            "from slice join process_track on track_id = process_track.id "
            "join process using (upid) where category not in ('step', 'error')"
        )
        found = {(node, rank): (ts, dur) for node, rank, ts, dur in sql(query)}
        assert found.keys() == calls.keys()
        for key, (start, duration, _) in calls.items():
            ts, dur = found[key]
            assert ts == start
            assert duration < 0 or dur == duration
        if sql("select 1 from pragma_table_info('machine') where name = 'name'"):  # reads manifests
            named = sql("select name from machine where name is not null")
            assert {name for (name,) in named} == {one["host"] for one in trace.run["ranks"]}
        bad = sql("select name, value from stats where severity = 'error' and value > 0")
        assert bad == []
