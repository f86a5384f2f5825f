"""The SDK's session against a real server."""

from __future__ import annotations

import gem_client
import numpy as np
from live import Live


def test_one_worker_joins_commits_and_sees_theta_move(live: Live) -> None:
    with gem_client.connect(live.address) as session:
        first = session.join({"w": np.ones((2, 3)), "b": np.zeros(3)}).copy()
        answer = session.commit(np.full(9, 0.5, np.float32), loss=1.0)
        assert answer.version == 1
        assert answer.staleness == 0
        np.testing.assert_array_equal(first, [1, 1, 1, 1, 1, 1, 0, 0, 0])
        assert (answer.theta < first).all()
    assert live.on_loop(lambda: dict(live.core.leases.ended)) == {"left": 1}
