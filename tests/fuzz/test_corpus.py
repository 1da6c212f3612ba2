"""Replay of the fuzzer's corpus without the fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.target import try_input
from tests.support.clients.transport_trial import End

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.parametrize("seed", CORPUS, ids=lambda path: path.name)
def test_an_input_of_the_corpus_does_no_harm(seed: Path) -> None:
    try_input(seed.read_bytes())


def test_the_corpus_has_inputs_for_every_end() -> None:
    ends = {End(path.read_bytes()[0] % len(End)) for path in CORPUS}
    assert ends == set(End)
