"""`rankscope serve`: the page of a trace beside the running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import LayoutOption, TraceArgument
from rankscope.cli.terminal import echo, opened, remark
from rankscope.tree.reader import open_trace
from rankscope.words.page.pagecontent import PageContent
from rankscope.words.page.pages import check_page
from rankscope.words.page.pageserver import PageServer, PageSource, is_loopback


def command(
    trace: TraceArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Default any that is free.")] = 0,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Other machines reach it: needs TLS.")
    ] = "127.0.0.1",
    certificate: Annotated[
        Path | None, typer.Option("--tls-certificate", metavar="FILE", help="PEM, with the chain.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="PEM; default in the same file."),
    ] = None,
    layout: LayoutOption = None,
) -> None:
    """Serve the page of `report` on this machine, renewed as steps arrive; Ctrl-C ends it."""
    folder = opened(trace).path

    def make() -> tuple[PageContent, bool]:
        found = open_trace(folder, wait_s=0.0)
        content, _ = check_page(found, layout)
        return content, found.is_live

    server = PageServer(PageSource(make), host=host, port=port, certificate=certificate, key=key)
    echo(server.url)
    remark("the token lets in whoever has this URL; Ctrl-C ends")
    if is_loopback(host):
        told = f"ssh -L {server.port}:127.0.0.1:{server.port} THIS_HOST"
        remark(f"served to this machine alone; from another: {told}")
    try:
        server.serve()
    except KeyboardInterrupt:
        remark("ended")
