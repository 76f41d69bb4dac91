"""`rankscope serve`: the page of a trace beside the running job."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.cli.arguments import LayoutOption, TraceArgument
from rankscope.cli.terminal import echo, opened, remark
from rankscope.tree.reader import open_trace
from rankscope.words.page.pagecontent import PageContent
from rankscope.words.page.pages import check_page
from rankscope.words.page.pageserver import PageServer, PageSource


def command(
    trace: TraceArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Default any that is free.")] = 0,
    layout: LayoutOption = None,
) -> None:
    """Serve the page of `report` on this machine, renewed as steps arrive; Ctrl-C ends it."""
    folder = opened(trace).path

    def make() -> tuple[PageContent, bool]:
        read_trace = open_trace(folder, wait_s=0.0)
        content, _ = check_page(read_trace, layout)
        return content, read_trace.is_live

    server = PageServer(PageSource(make), port=port)
    echo(server.url)
    remark("the token lets in whoever has this URL; Ctrl-C ends")
    command_line = f"ssh -L {server.port}:127.0.0.1:{server.port} THIS_HOST"
    remark(f"served to this machine alone; from another: {command_line}")
    try:
        server.serve()
    except KeyboardInterrupt:
        remark("ended")
