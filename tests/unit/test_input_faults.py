"""Every fault of stores and inputs gets a sentence, and leaves a store that is valid."""

import pytest

from input_faults import Bench, Fault, faults


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in faults()])
def test_each_fault_gets_a_sentence_and_the_store_stays_valid(bench: Bench, fault: Fault) -> None:
    said, seconds = bench.judge(fault)
    assert said is None
    assert seconds < 30
