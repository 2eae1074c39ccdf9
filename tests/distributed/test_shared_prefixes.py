"""Processes whose rows share different prefixes run equally many passes, and get the targets of whole rows."""

from __future__ import annotations

import pytest
import shared_prefixes
import variants
from support import forks

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(forks.SECONDS + 60)]


@pytest.mark.parametrize(
    ("strategy", "teachers"),
    [
        ("zero3_cpu", ["sharded", "streamed", "own base"]),
        ("fsdp2_cpu", ["streamed", "own base"]),
        ("ddp", ["streamed", "own base"]),
    ],
)
def test_different_prefixes_per_process_equal_whole_rows(tmp_path, strategy, teachers):
    variants.save_models(tmp_path)
    found = forks.results(strategy, shared_prefixes.read, tmp_path, teachers)
    for name in teachers:
        first, second = (found[rank][name] for rank in (0, 1))
        assert max(first["apart"], second["apart"]) < 2e-6
        assert first["kept"] == second["kept"] == 160
        assert first["saved"] == 2 * 130 + 2 * 130 + 160
        assert second["saved"] == 2 * 150 + 160, "rows of two documents share nothing"
