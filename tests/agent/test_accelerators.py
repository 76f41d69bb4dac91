"""Digests that come back later are written where they belong."""

from __future__ import annotations

import pytest
import torch

from rankscope.agent.values.valuereader import DeviceValues, ValuePlace
from rankscope.capture.describe import Describer
from rankscope.capture.digest import Digester
from rankscope.record.phases import Phase

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_every_reading_finds_its_place_and_says_what_the_host_would_have_said(device: str) -> None:
    values, describer = DeviceValues(batch_dim=0), Describer(rank=0)
    tensors = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in range(1, 6)]
    for number, tensor in enumerate(tensors):
        described, local = describer.describe(tensor.to(device))
        place = ValuePlace(number, "output", described, Phase.FORWARD, 0, 0)
        assert values.read(local, place, samples=True)
    values.flush()
    arrived = values.collect(wait=True)
    assert [place.sequence for place, _ in arrived] == list(range(5))
    for (_, reading), tensor in zip(arrived, tensors, strict=True):
        expected = Digester().read(tensor, None, samples=True)
        assert reading.mean == pytest.approx(expected.mean, rel=1e-6, abs=1e-9)
        assert reading.sketch == pytest.approx(expected.sketch, rel=1e-5, abs=1e-5)
    assert values.collect(wait=True) == [], "each is handed out once"
