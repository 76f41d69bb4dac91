"""The same page in Firefox: it opens, says its verdict, and shows what is under a cell."""

from __future__ import annotations

import struct

import pytest

from tests.waiting import wait_until


@pytest.mark.parametrize("name", ["nonfinite-origin", "crash", "hostile"])
def test_a_page_opens_and_leads_to_the_cell(name: str, page_of, firefox, shot) -> None:
    url = page_of(name).as_uri()
    firefox.open(url)
    assert firefox.evaluate("document.querySelector('#verdict').innerText").startswith("FAULT")
    assert wait_until(
        lambda: firefox.evaluate(
            "document.querySelectorAll('#grid [role=row]:not([hidden])').length"
        ),
        60,
    )
    box = (
        "(e => e && e.getBoundingClientRect().bottom)(document.querySelector('#verdict .verdict'))"
    )
    assert 0 < firefox.evaluate(box) < 800
    firefox.evaluate("void document.querySelector('a.to-map').click()")
    assert wait_until(
        lambda: "origin" in firefox.evaluate("document.querySelector('#detail').innerText"), 60
    )
    painted = """(({ width, height }, pen) => [...pen.getImageData(0, 0, width, height).data]
        .filter((byte, at) => at % 4 === 3 && byte === 255).length)
        (document.querySelector('#cells'), document.querySelector('#cells').getContext('2d'))"""
    assert wait_until(lambda: firefox.evaluate(painted) > 1000, 60)
    picture = firefox.screenshot(shot(f"firefox-{name}")).read_bytes()
    wide, high = struct.unpack(">II", picture[16:24])
    assert (wide, high) == (1280, 800)
    assert firefox.said == []
    assert {each for each in firefox.asked if not each.startswith(("data:", "blob:"))} <= {url}


def test_keys_move_on_the_map(page_of, firefox) -> None:
    firefox.open(page_of("crash").as_uri())
    firefox.evaluate("void document.querySelector('#grid').focus()")
    hash_of = "decodeURIComponent(location.hash)"
    firefox.press("f")
    assert wait_until(lambda: "path=layers.1.attention&" in firefox.evaluate(hash_of), 60)
    firefox.evaluate("void document.querySelector('#grid').focus()")
    firefox.press("\ue013", "\ue007")  # arrow up, Enter
    there = "document.querySelector('#detail h3').textContent"
    assert wait_until(lambda: firefox.evaluate(there) != "layers.1.attention", 60)
    assert firefox.evaluate(hash_of).startswith(f"#path={firefox.evaluate(there)}&")
    assert firefox.evaluate("document.activeElement.id") == "detail"
    assert firefox.said == []
